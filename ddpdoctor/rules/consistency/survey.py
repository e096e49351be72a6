"""The differences of one kind of tensor in all models of a job: which count, and why others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped

from .intended import excuse_of_cause, excuse_of_job, excuse_of_model, excuse_of_sighting
from .replicas import replicas_of, sightings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.model.consistency import What
    from ddpdoctor.model.facts import Job

    from .blame import DriftCause
    from .replicas import Replica, Sighting


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A difference that counts, and its likely cause."""

    sighting: Sighting
    cause: DriftCause
    since: int | None = None
    """The step at which it began, if known to be before the step at which it was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The differences of one kind of tensor in a job."""

    found: tuple[Found, ...]
    """The first difference of each model, the earliest first."""
    compared: bool
    """Whether tensors of this kind were compared at least once, in at least one model."""
    excuses: tuple[str, ...]
    """Why some differences do not count, or models were not compared."""


def survey(job: Job, what: What, why: Callable[[Sighting], DriftCause]) -> Survey:
    """Return the differences of a kind that count. ``why`` returns the cause of each."""
    found: list[Found] = []
    excuses: list[str] = []
    compared = False
    for replica in replicas(job):
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


def replicas(job: Job) -> tuple[Replica, ...]:
    """Return the models of a job whose replicas were compared."""
    return replicas_of(job.consistency) if job.consistency is not None else ()


def ruling(job: Job, survey_: Survey, findings: Iterable[Problem], noun: str) -> Answer:
    """Return the findings, or "passed", or why nothing can be said. ``noun`` names what was to be compared."""
    told = tuple(findings)
    if told:
        return judged(told)
    if survey_.excuses and not survey_.compared:
        return skipped("; ".join(survey_.excuses))
    return passed() if survey_.compared else skipped(why_nothing(job, noun))


def why_nothing(job: Job, noun: str) -> str:
    """Return why no tensors of a kind were compared."""
    if job.consistency is None:
        return "replicas were not compared"
    if not job.consistency.check_every:
        return "comparing replicas was turned off"
    streams = job.consistency.streams
    if not streams:
        unread = job.consistency.unread
        return unread[0] if unread else "no DDP model was trained on two ranks or more that could be seen"
    if not any(stream.compared for stream in streams):
        alone = sorted({rank for stream in streams for rank in stream.unpaired})
        whose = f": {rank_list(alone)} wrote moments that no other rank has" if alone else ""
        return f"nothing was compared because no two ranks wrote the same moment{whose}"
    return f"no {noun} were compared"


def _in_model(
    job: Job, replica: Replica, what: What, why: Callable[[Sighting], DriftCause]
) -> tuple[list[Found], list[str]]:
    """Return the first difference that counts, and why those before it do not."""
    excuses: list[str] = []
    for sighting in sightings(replica, what):
        excuse = excuse_of_sighting(sighting) or excuse_of_job(job, sighting)
        cause = why(sighting)
        excuse = excuse or excuse_of_cause(sighting, cause)
        if not excuse:
            return [Found(sighting=sighting, cause=cause)], excuses
        excuses.append(excuse)
    return [], excuses


def _is_compared(replica: Replica, what: What, *, excused: bool) -> bool:
    """Return whether any stream found tensors equal at all times, or at least before its first difference."""
    for stream in replica.streams:
        if what not in stream.kinds:
            continue
        difference = next((one for one in stream.differences if one.what is what), None)
        if difference is None or difference.last_equal is not None or not excused:
            return True
    return False
