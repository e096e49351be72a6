"""The differences of one kind of tensor in all models of a job: which count, and why others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.consistency.problems import FoundDifference
from ddpdoctor.rules.consistency.replicas import all_values, is_aligned, replicas_of, sightings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.consistency.problems import DriftCause
    from ddpdoctor.rules.consistency.replicas import ReplicaStreams, Sighting

_LOCAL_SGD = "ocalSGD"
"""Part of the names of torch's hook and optimizer, ``post_localSGD_hook`` and ``PostLocalSGDOptimizer``."""
_SHARDED = "ZeroRedundancyOptimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The differences of one kind of tensor in a job."""

    found: tuple[FoundDifference, ...]
    """The first difference of each model, the earliest first."""
    compared: bool
    """Whether tensors of this kind were compared at least once, in at least one model."""
    excuses: tuple[str, ...]
    """Why some differences do not count, or models were not compared."""


def survey(job: Job, what: What, why: Callable[[Sighting], DriftCause]) -> Survey:
    """Return the differences of a kind that count. ``why`` returns the cause of each."""
    found: list[FoundDifference] = []
    excuses: list[str] = []
    compared = False
    for replica in replicas_of(job):
        excuse = excuse_of_model(replica, what)
        if excuse:
            excuses.append(excuse)
            continue
        those, why_not = _in_model(job, replica, what, why)
        found += those
        excuses += why_not
        compared = compared or _is_compared(replica, what, excused=bool(why_not))
    found.sort(key=lambda one: one.sighting.step)
    return Survey(found=tuple(found), compared=compared, excuses=tuple(dict.fromkeys(excuses)))


def ruling(job: Job, survey_: Survey, findings: Iterable[Problem], noun: str) -> Answer:
    """Return the findings, or "passed", or why nothing can be said. ``noun`` names what was to be compared."""
    found = tuple(findings)
    if found:
        return judged(found)
    if survey_.excuses and not survey_.compared:
        return skipped("; ".join(survey_.excuses))
    return passed() if survey_.compared else skipped(why_nothing(job, noun))


def why_nothing(job: Job, noun: str) -> str:
    """Return why no tensors of a kind were compared."""
    if job.consistency is None:
        return "replicas were not compared"
    if not job.consistency.check_every:
        return "comparing replicas was disabled"
    streams = job.consistency.streams
    if not streams:
        unread = job.consistency.unread
        return unread[0] if unread else "no DDP model was trained on two or more visible ranks"
    if not any(stream.compared for stream in streams):
        alone = sorted({rank for stream in streams for rank in stream.unpaired})
        whose = f": {rank_list(alone)} wrote fingerprints for steps that no other rank has" if alone else ""
        return f"nothing was compared because no two ranks wrote fingerprints of the same step{whose}"
    return f"no {noun} were compared"


def _in_model(
    job: Job, replica: ReplicaStreams, what: What, why: Callable[[Sighting], DriftCause]
) -> tuple[list[FoundDifference], list[str]]:
    """Return the first difference that counts, and why those before it do not."""
    excuses: list[str] = []
    for sighting in sightings(replica, what):
        excuse = excuse_of_sighting(sighting) or excuse_of_job(job, sighting)
        cause = why(sighting)
        excuse = excuse or excuse_of_cause(sighting, cause)
        if not excuse:
            return [FoundDifference(sighting=sighting, cause=cause)], excuses
        excuses.append(excuse)
    return [], excuses


def _is_compared(replica: ReplicaStreams, what: What, *, excused: bool) -> bool:
    """Return whether any stream found tensors equal at all times, or at least before its first difference."""
    for stream in replica.streams:
        if what not in stream.kinds:
            continue
        difference = next((one for one in stream.differences if one.what is what), None)
        if difference is None or difference.last_equal is not None or not excused:
            return True
    return False


def excuse_of_model(replica: ReplicaStreams, what: What) -> str:
    """Return why tensors of a kind may differ in a model at any time, or "" if they may not."""
    values = all_values(replica.streams)
    if any(_LOCAL_SGD in name for each in values for name in (each.hook, each.optimizer)):
        return "local SGD: ranks differ by design until their parameters are averaged"
    if what is What.STATE and any(_SHARDED in each.optimizer for each in values):
        return f"{_SHARDED}: each rank has the state of its own shard"
    if what is not What.PARAMETER and _joins(replica):
        return "ranks may make different numbers of steps inside DDP's join: only the end is compared"
    return ""


def excuse_of_sighting(sighting: Sighting) -> str:
    """Return why one difference does not count, or "" if it does."""
    if sighting.stream.clock is not StreamClock.END and _joins(sighting.replica):
        return "ranks may make different numbers of steps inside DDP's join: only the end is compared"
    if not is_aligned(sighting.values):
        return _uneven_words(sighting)
    if _came_after_training(sighting):
        return f"parameters were equal after the last step, {sighting.step}, and changed only later"
    return ""


def excuse_of_job(job: Job, sighting: Sighting) -> str:
    """Return why a difference results from what ended the job, or "" if it is a fault of its own."""
    raised = any(error.reducer is not None for rank in job.ranks for error in rank.raised if error.uncaught)
    if raised and any(each.unfinished for each in sighting.values):
        return "DDP had not finished its reduction and raised an error at the next forward"
    return ""


def excuse_of_cause(sighting: Sighting, cause: DriftCause) -> str:
    """Return why gradients may stay unreduced, because the script makes parameters equal itself, or ""."""
    if cause.unsynchronized and _ends_equal(sighting.replica):
        return "local SGD: gradients were not reduced, and the parameters were equal at the end"
    return ""


def _joins(replica: ReplicaStreams) -> bool:
    return any(each.join for each in all_values(replica.streams))


def _ends_equal(replica: ReplicaStreams) -> bool:
    ends = [stream for stream in replica.streams if stream.clock is StreamClock.END and stream.compared]
    return bool(ends) and not any(one.what is What.PARAMETER for stream in ends for one in stream.differences)


def _came_after_training(sighting: Sighting) -> bool:
    """Return whether all was equal after the last step: what a rank loads to evaluate does not harm training."""
    if sighting.stream.clock is not StreamClock.END:
        return False
    steps = [
        stream.last_number
        for stream in sighting.replica.streams
        if stream.clock is StreamClock.STEP
        and What.PARAMETER in stream.kinds
        and not any(one.what is What.PARAMETER for one in stream.differences)
    ]
    return sighting.step in steps


def _uneven_words(sighting: Sighting) -> str:
    least = min(each.reductions for each in sighting.values)
    behind = [each.rank for each in sighting.values if each.reductions == least]
    return (
        f"the ranks were at different points at optimizer step {sighting.step}: {rank_list(behind)} had reduced fewer "
        "backwards"
    )
