"""DD610: a rank that is slow, not hung: the others wait for it in step after step."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.findings import Confidence, Place, Severity
from ddpdoctor.model.steps import Phase, StepEnd
from ddpdoctor.model.words import grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.groups import group_words
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.progress.pace import (
    COST_SHARE,
    MIN_STEPS,
    Late,
    LateDevice,
    find_late,
    find_late_device,
    find_pacings,
    peer_wait_ms,
    slow_phase,
)
from ddpdoctor.rules.progress.places import places
from ddpdoctor.rules.progress.slow_causes import SlowCause, find_slow_reason, shares_busy_cores
from ddpdoctor.rules.progress.stalled import TIMING
from ddpdoctor.rules.progress.words import place_words, verb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.stacks import Frame

SECOND_LINE = 0.25
"""A second line is named if the rank is seen there at least this often relative to the first. Our choice: a loop's body
has two or three lines, and a line that is rarely seen has no part in it."""
EXPLAINED = 0.5
"""Share of the cost that the slow phase must explain for high confidence. Our choice: most of it."""

_OUTSIDE = {Phase.BEFORE, Phase.BETWEEN}
"""Where a line that calls a model or a library, as to evaluate or to save, says more than a line in the model."""
_SITES = {Phase.FORWARD: "ddp_forward", Phase.BACKWARD: "backward"}
"""The recorded call whose line is used for a phase in which the rank was never sampled."""
_WORDS = {
    Phase.BEFORE: "before forward",
    Phase.FORWARD: "in forward",
    Phase.BETWEEN: "between forward and backward",
    Phase.BACKWARD: "in backward",
}
_SAME_WORK = (
    "give all ranks inputs of the same size; if the work is the same, run `ddpdoctor check-env` to find a throttled "
    "GPU or another process on its cores"
)
_FIXES = {
    Phase.BEFORE: "speed up data loading and host code before forward: more workers (DataLoader(num_workers=...)) or "
    "prefetching, and no logging, saving or evaluation on one rank in each step",
    Phase.FORWARD: _SAME_WORK,
    Phase.BETWEEN: "do the work next to the loss on all ranks, less often, or without waiting for it",
    Phase.BACKWARD: _SAME_WORK,
}


@rule("DD610", "straggler", Severity.WARNING, "A rank is slow, and the others wait for it in every step")
def check_straggler(job: JobState) -> Answer:
    """Report a rank that comes last to nearly every step and costs the others a fifth of it."""
    if job.cause is not Cause.NONE:
        return skipped(job.cause.value)
    pacings = find_pacings(job.facts)
    seen = [late for late in map(find_late, pacings) if late is not None]
    if not seen and (any(rank.device_times for rank in job.facts.ranks) or _is_unknown(job)):
        return _judge_devices(job)
    if not pacings:
        return skipped("fewer than two ranks recorded steps")
    if not seen:
        most = max(pacing.steps for pacing in pacings)
        return skipped(f"{most} steps were recorded, fewer than {MIN_STEPS}")
    costly = [slow for late in seen if late.is_costly and (slow := _without_waiters(job, late)) is not None]
    bound = [late for late in costly if _is_input_bound(job, late)]
    contested = [late for late in costly if late not in bound and _shares_busy_cores(job, late)]
    findings = tuple(_finding(job, late) for late in costly if late not in bound and late not in contested)
    if findings or not costly:
        return judged(findings)
    return _nobody_slow(bound, contested)


def _nobody_slow(bound: Iterable[Late], contested: Sequence[Late]) -> Answer:
    """Say why none of the late ranks is named."""
    if contested:
        return unknown(
            "all ranks wait for cores that other programs use, so a different rank is late at different times"
        )
    numbers = sorted(number for late in bound for number in late.pacing.paces)
    return skipped(f"the loader workers of {rank_list(numbers)} are always busy, so no single rank is slow")


def _is_unknown(job: JobState) -> bool:
    """Return whether steps were left out because their waiting time is not known, as on a GPU."""
    return any(rank.step_times is not None and rank.step_times.unknown for rank in job.facts.ranks)


def _judge_devices(job: JobState) -> Answer:
    late = find_late_device(job)
    if late is not None:
        return judged([_device_finding(job, late)])
    if any(rank.device_times for rank in job.facts.ranks):
        return passed()
    return unknown(f"waits between ranks on their devices are only measured with {TIMING}")


def _device_finding(job: JobState, late: LateDevice) -> Problem:
    who = say.who(job, (late.rank,))
    group = group_words(late.group, job.world)
    return Problem(
        confidence=Confidence.MEDIUM,
        ranks=(late.rank,),
        hosts=say.hosts_of(job, (late.rank,)),
        where=places(late.rank, [line.frame for line in job.rank(late.rank).lines_seen[:1] if not line.in_child]),
        summary=(
            f"{who} is slow on its device: it started last in {late.last_in} collectives of about {late.steps} steps"
        ),
        evidence=(
            f"in {group}, its kernels ran {_ms(late.cost_ms)} shorter than on any other rank: it does not wait",
            f"a step takes at most {_ms(late.step_ms)}, including the start of the job",
        ),
        fix=_SAME_WORK,
    )


def _without_waiters(job: JobState, late: Late) -> Late | None:
    """Return the late ranks without those that are late because they wait for a peer, or None if all of them do."""
    usual = median(peer_wait_ms(job.rank(number)) for number in late.others)
    waited = {number: max(0.0, peer_wait_ms(job.rank(number)) - usual) for number in late.ranks}
    slow = tuple(number for number in late.ranks if late.matters(late.cost_ms - waited[number]))
    return replace(late, ranks=slow, last_in={number: late.last_in[number] for number in slow}) if slow else None


def _is_input_bound(job: JobState, late: Late) -> bool:
    """Return whether the other ranks' own workers are at the limit, so that the late ranks hardly slow them down.

    If all ranks wait for their data, a rank that is a little behind finds no batch ready, and the others wait for it.
    """
    times = [job.rank(number).fetch_times for number in late.others]
    known = [one.busy_share for one in times if one is not None and one.batches >= MIN_STEPS]
    return len(known) == len(late.others) and median(known) > 1 - COST_SHARE


def _shares_busy_cores(job: JobState, late: Late) -> bool:
    others = [job.rank(number) for number in late.others]
    return all(shares_busy_cores(job.rank(number), others, late.cost_ms) for number in late.ranks)


def _finding(job: JobState, late: Late) -> Problem:
    by_phase = grouped((slow_phase(late, number)[0], number) for number in late.ranks)
    main = max(by_phase, key=lambda phase: len(by_phase[phase]))
    others = [job.rank(number) for number in late.others]
    reason = find_slow_reason(job.rank(late.ranks[0]), others, late.cost_ms)
    collects = reason is not None and reason.cause is SlowCause.COLLECTIONS
    where = tuple(place for number in late.ranks for place in _places(job, late, number, collects=collects))
    return Problem(
        confidence=_sureness(job, late),
        ranks=late.ranks,
        hosts=say.hosts_of(job, late.ranks),
        where=where,
        summary=_summary(job, late, main, where),
        evidence=(
            *_waits(late),
            *(_spends(job, late, phase, ranks) for phase, ranks in by_phase.items()),
            *((reason.seen,) if reason is not None else ()),
            *_worker_words(job, late),
        ),
        fix=reason.fix if reason is not None else _FIXES[main],
        share=min(1.0, late.cost_ms / late.pacing.step_ms) if job.facts.speed_asked else None,
    )


def _sureness(job: JobState, late: Late) -> Confidence:
    for number in late.ranks:
        phase, own, usual = slow_phase(late, number)
        if own - usual < EXPLAINED * late.cost_ms or not _lines(job.rank(number), phase):
            return Confidence.MEDIUM
    return Confidence.HIGH


def _summary(job: JobState, late: Late, phase: Phase, where: Sequence[Place]) -> str:
    late_words = say.who(job, late.ranks)
    lines = {(place.file, place.line) for place in where}
    at = f", {place_words(where[0])}" if where and (len(late.ranks) == 1 or len(lines) == 1) else ""
    often = f"{min(late.last_in.values())} of {late.pacing.steps}"
    return (
        f"{late_words} {verb(late.ranks, 'is', 'are')} slow {_phase_words(job, late, phase)}{at}; "
        f"the others waited for {verb(late.ranks, 'it', 'them')} in {often} steps"
    )


def _waits(late: Late) -> list[str]:
    """Return who came last how often, and who waited how long."""
    found = []
    by_count = grouped((times, number) for number, times in late.last_in.items())
    for times, ranks in sorted(by_count.items()):
        found.append(f"{rank_list(ranks)} came last in {times} of {late.pacing.steps} steps")
    step = late.pacing.step_ms
    waited = [late.pacing.paces[number].waited_ms for number in late.others]
    between = f", {_ms(min(waited))} to {_ms(max(waited))}" if _ms(min(waited)) != _ms(max(waited)) else ""
    found.append(
        f"{rank_list(late.others)} waited {_ms(late.cost_ms)} longer than {rank_list(late.ranks)} (median), "
        f"{late.cost_ms / step:.0%} of a {_ms(step)} step; they wait {_ms(median(waited))} per step{between}"
    )
    return found


def _spends(job: JobState, late: Late, phase: Phase, ranks: Sequence[int]) -> str:
    own = median(slow_phase(late, number)[1] for number in ranks)
    usual = slow_phase(late, ranks[0])[2]
    return (
        f"{rank_list(ranks)} {verb(ranks, 'spends', 'spend')} {_ms(own)} {_phase_words(job, late, phase)}, "
        f"and the others spend {_ms(usual)}"
    )


def _worker_words(job: JobState, late: Late) -> list[str]:
    """Return how long loader workers take for a batch, on the late ranks and on the others, if both have workers."""
    groups = [[job.rank(number).fetch_times for number in numbers] for numbers in (late.ranks, late.others)]
    own, theirs = ([one for one in group if one is not None and one.batches >= MIN_STEPS] for group in groups)
    if not own or not theirs:
        return []
    words = (
        f"a loader worker of {rank_list(late.ranks)} takes {_ms(median(one.batch_ms for one in own))} per batch and "
        f"is busy {median(one.busy_share for one in own):.0%} of the time; on the others it takes "
        f"{_ms(median(one.batch_ms for one in theirs))} and is busy {median(one.busy_share for one in theirs):.0%}"
    )
    return [words]


def _phase_words(job: JobState, late: Late, phase: Phase) -> str:
    """Return the name of a phase. If no forward was seen, "before forward" covers everything but backward."""
    times = job.rank(late.ranks[0]).step_times
    if phase is not Phase.BEFORE or times is None or any(times.phases_us[Phase.FORWARD]):
        return _WORDS[phase]
    return "between collectives" if times.ends_with is StepEnd.COLLECTIVE else "outside backward"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _places(job: JobState, late: Late, number: int, *, collects: bool) -> tuple[Place, ...]:
    """Return the lines at which a late rank was seen most in its slow phase, else that phase's own line.

    A rank that collects garbage cannot be seen at it, and its line was noted.
    """
    rank = job.rank(number)
    phase = slow_phase(late, number)[0]
    noted = rank.speed.collected_at if collects and rank.speed is not None else None
    frames = (noted,) if noted is not None else _lines(rank, phase) or _site(rank, phase)
    return places(number, frames)


def _lines(rank: Rank, phase: Phase) -> tuple[Frame, ...]:
    seen = [line for line in rank.lines_seen if line.phase is phase and not line.in_child]
    own = [line for line in seen if not line.calls_module]
    if not own:
        return ()
    least = SECOND_LINE * own[0].times
    often = [line.frame for line in own if line.times >= least]
    loaders = _loader_sites(rank)
    if phase is Phase.BEFORE and _key(often[0]) in loaders:
        return (*_worker_lines(rank, loaders)[:1], *often)
    if phase not in _OUTSIDE:
        return tuple(often)
    calls = [
        line.frame for line in seen if line.calls_module and line.times >= least and _key(line.frame) not in loaders
    ]
    return (*calls[:1], *often)


def _loader_sites(rank: Rank) -> set[tuple[str, int]]:
    """Return the lines at which a rank takes batches. A rank that is seen there waits for its loader."""
    return {_key(kind.site) for kind in pack_calls(rank.recent_calls).kinds if kind.op == "next_batch" and kind.site}


def _worker_lines(rank: Rank, loaders: set[tuple[str, int]]) -> tuple[Frame, ...]:
    """Return the lines at which the workers were seen.

    An idle forked worker still has its parent's line on its stack. A spawned worker first runs the script's module,
    which imports torch and makes no batch. Neither counts.
    """
    keyed = ((_key(line.frame), line) for line in rank.lines_seen if line.in_child)
    found = grouped((key, line) for key, line in keyed if key not in loaders)
    most = sorted(
        found.values(), key=lambda lines: (lines[0].frame.function == "<module>", -sum(line.times for line in lines))
    )
    return tuple(lines[0].frame for lines in most)


def _site(rank: Rank, phase: Phase) -> tuple[Frame, ...]:
    kinds = pack_calls(rank.recent_calls).kinds
    return tuple(kind.site for kind in kinds if kind.op == _SITES.get(phase) and kind.site is not None)


def _key(frame: Frame) -> tuple[str, int]:
    return frame.file, frame.line
