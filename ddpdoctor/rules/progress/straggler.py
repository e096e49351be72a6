"""DD610: a rank that is slow, not hung: the others wait for it in step after step, and why it is slower."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.model.facts import POINT_TO_POINT
from ddpdoctor.model.findings import Confidence, Place, Severity
from ddpdoctor.model.steps import Pace, Phase, StepEnd, StepTimes, pace_of, step_totals, wait_totals
from ddpdoctor.model.words import grouped, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import Cause, JobState, asked_if
from ddpdoctor.rules.progress.states import place_words, places
from ddpdoctor.rules.progress.transport import TIMING
from ddpdoctor.rules.progress.waits import DEFAULT_GROUP, Group, group_table, group_words, own_state
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.facts import Job, Rank
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.model.steps import Speed

MIN_STEPS = 20  # below this number of steps nothing is said: the design's figure
LATE_SHARE = 0.8  # share of the steps in which a rank must come last: the design's figure
COST_SHARE = 0.2  # share of the median step that the others must wait for it: the design's figure
COST_MS = 20.0  # milliseconds that the others must wait at the median: the design's figure
# Ranks are separated at the first gap between their waits that is at least this share of the widest gap. Our choice:
# two ranks that are slow for the same reason differ by less. If one rank is slow and another is slower, the others wait
# only for the slower one.
CLEAR_GAP = 0.5
# Share of the other ranks that may still come later in a step. Our choice: of a thousand, one is late by chance in any
# step.
OUTLIERS = 0.01
MOST = 0.5  # A cause must explain half of what the others wait for. Our choice: then no other cause explains more.
# Batches, or processor time, this much larger count as different. Our choice: the last batch of an epoch is smaller and
# changes no median.
LARGER = 1.2
COMPUTES = 0.5  # from this share of processor time, a part of a step is computation
# If ranks wait for a core in a larger share of their time, other programs use their cores. Our choice: on an idle
# machine they wait less. With a busy loop on each core, ranks that mostly sleep wait in 3 to 30 % of it.
BUSY = 0.02
# If all ranks wait for a core in such a share of their time, their loader workers do too. Our choice: five times
# ``BUSY``, so that a slow disk is still found on a machine with some other load.
CROWDED = 0.1
# A second line is named if the rank is seen there at least this often relative to the first. Our choice: a loop's body
# has two or three lines, and a line that is rarely seen has no part in it.
SECOND_LINE = 0.25
EXPLAINED = 0.5  # Share of the cost that the slow phase must explain for high confidence. Our choice: most of it.
# Where a line that calls a model or a library, as to evaluate or to save, says more than a line in the model.
_OUTSIDE = {Phase.BEFORE, Phase.BETWEEN}
# The recorded call whose line is used for a phase in which the rank was never sampled.
_SITES = {Phase.FORWARD: "ddp_forward", Phase.BACKWARD: "backward"}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Members of a group whose steps can be compared."""

    steps: int  # how many steps all of them have
    waits_ms: Mapping[int, tuple[float, ...]]  # the waits of each rank, one for each of those steps
    paces: Mapping[int, Pace]
    step_ms: float  # the median step


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Ranks that the others in their group wait for."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    last_in: Mapping[int, int]  # for each late rank, the number of steps in which it came after all the others
    cost_ms: float  # how long the others wait for them in the median step
    pacing: Pacing

    def matters(self, cost_ms: float) -> bool:
        return cost_ms >= max(COST_MS, COST_SHARE * self.pacing.step_ms)


def find_pacings(facts: Job) -> tuple[Pacing, ...]:
    """Return the comparable steps of each group in which two or more ranks recorded steps."""
    table = group_table(facts)
    together: dict[object, dict[int, StepTimes]] = {}
    for rank in facts.ranks:
        times = rank.step_times
        if times is not None and times.numbers:
            group = table.get((rank.rank, times.group))
            members = group.members if group is not None else ()
            together.setdefault((times.ends_with, times.group, members), {})[rank.rank] = times
    found = []
    for ranks in (ranks for ranks in together.values() if len(ranks) > 1):
        common = set.intersection(*(set(times.numbers) for times in ranks.values()))
        paces = {number: pace_of(times) for number, times in ranks.items()}
        totals = [_common_ms(times, step_totals(times), common) for times in ranks.values()]
        found.append(Pacing(
            steps=len(common),
            waits_ms={number: _common_ms(times, wait_totals(times), common) for number, times in ranks.items()},
            paces={number: pace for number, pace in paces.items() if pace is not None},
            step_ms=median(map(median, totals)) if common else 0.0,
        ))  # fmt: skip
    return tuple(found)


def _common_ms(times: StepTimes, values_us: Iterable[int], common: set[int]) -> tuple[float, ...]:
    return tuple(value / 1e3 for number, value in zip(times.numbers, values_us, strict=True) if number in common)


def find_late(pacing: Pacing) -> Late | None:
    """Return the ranks that wait least, at most half of all, or None if there are too few steps to decide."""
    if pacing.steps < MIN_STEPS:
        return None
    usual = {number: median(waits) for number, waits in pacing.waits_ms.items()}
    order = sorted(usual, key=lambda number: usual[number])
    waits_ms = [usual[number] for number in order]
    gaps = [after - before for before, after in pairwise(waits_ms)][: len(waits_ms) // 2]
    widest = max(gaps)
    split = 1 + next(i for i, gap in enumerate(gaps) if gap >= CLEAR_GAP * widest)
    late, others = order[:split], order[split:]
    spared = int(len(others) * OUTLIERS)
    first = [sorted(waits)[spared] for waits in zip(*(pacing.waits_ms[number] for number in others), strict=True)]
    least = map(max, zip(*(pacing.waits_ms[number] for number in late), strict=True))
    theirs = map(median, zip(*(pacing.waits_ms[number] for number in others), strict=True))
    costs: list[float] = [max(0.0, waited - own) for waited, own in zip(theirs, least, strict=True)]
    last_in = {
        number: sum(own < other for own, other in zip(pacing.waits_ms[number], first, strict=True)) for number in late
    }
    ranks, rest = tuple(sorted(late)), tuple(sorted(others))
    return Late(ranks=ranks, others=rest, last_in=last_in, cost_ms=median(costs), pacing=pacing)


def peer_wait_ms(rank: Rank) -> float:
    """Return how long blocking calls to a single peer take in the median step: ``StepTimes`` leaves these waits out."""
    times = rank.step_times
    log = rank.recent_calls
    calls = log.of_kinds(lambda kind: kind.op in POINT_TO_POINT and kind.thread_is_main and not kind.is_async)
    if times is None or not times.ended_ns or not calls:
        return 0.0
    began = [end - 1000 * total for end, total in zip(times.ended_ns, step_totals(times), strict=True)]
    waits_ns: dict[int, int] = defaultdict(int)
    for call in calls:
        at = bisect_left(times.ended_ns, call.ended_ns or 0)
        if at < len(began) and call.started_ns >= began[at]:
            waits_ns[at] += (call.ended_ns or 0) - call.started_ns
    recorded = range(bisect_left(began, log[0].started_ns), len(began))
    return median([waits_ns[at] for at in recorded] or [0]) / 1e6


def _late_device(job: JobState, group: Group, times: Mapping[int, Mapping[int, float]]) -> Problem | None:
    """Report the rank of a group whose kernels are the shortest in step after step: it came last by ``COST_MS``."""
    whole = [ran for ran in times.values() if len(ran) == len(group.members)]
    # Upper bounds of the collectives in a step and of its length, which includes the start of the job.
    members = [job.ranks[number] for number in group.members if number in job.states]
    done = max(1, min((rank.steps for rank in members), default=1))
    begun = [state.enqueued for rank in members if (state := own_state(rank, group.name)) is not None]
    lived_ns = [(rank.ended_ns or job.time_ns) - (rank.started_ns or 0) for rank in members]
    step_ms = max(lived_ns, default=0) / 1e6 / done
    steps = int(len(whole) / max(1.0, max(begun, default=0) / done))
    if steps < MIN_STEPS:
        return None
    firsts = (sorted(ran.items(), key=lambda item: item[1])[:2] for ran in whole)
    costs = grouped((rank, second - least) for (rank, least), (_, second) in firsts if second - least >= COST_MS)
    number = max(costs, key=lambda number: len(costs[number]), default=None)
    if number is None or len(costs[number]) < LATE_SHARE * steps:
        return None
    cost_ms = median(costs[number])
    if cost_ms < COST_SHARE * step_ms:
        return None
    where = f"in {group_words(group, job.world)}"
    return say.problem_of(
        job,
        (number,),
        confidence=Confidence.MEDIUM,
        where=places(number, [line.frame for line in job.ranks[number].lines_seen[:1] if not line.in_child]),
        summary=f"{say.who(job, (number,))} is slow on its device: it started last in {len(costs[number])} collectives "
        f"of about {steps} steps",
        evidence=(
            f"{where}, its kernels ran {_ms(cost_ms)} shorter than on any other rank: it does not wait",
            f"a step takes at most {_ms(step_ms)}, including the start of the job",
        ),
        fix=_SAME_WORK,
        step=None,
    )


class SlowCause(Enum):
    """What makes a rank slow, by what to do about it."""

    COLLECTIONS = "call gc.freeze() after setup, and run the collector on all ranks in the same step"
    HOST_LOAD = "find out what else runs on its cores (top -H), or pin each rank to its own cores"
    BATCH = "give all ranks batches of the same size: the same batch_size, or batches of similar lengths"
    INPUT = "check where this rank reads its data, and give its loader more workers"
    WORK = "give all ranks the same work: inputs of the same size, and no extra branch on one rank"
    COMPUTE = (
        "look for waits on this rank only; run `ddpdoctor check-env` to find a throttled device or other processes"
    )


class SlowReason(NamedTuple):
    """The cause, and a sentence that shows it."""

    cause: SlowCause
    seen: str


def find_slow_reason(rank: Rank, others: Sequence[Rank], cost_ms: float) -> SlowReason | None:
    """Return why a rank costs the others ``cost_ms`` a step, or None if the records do not show it."""
    own = rank.speed
    theirs = [other.speed for other in others if other.speed is not None]
    if own is None or not own.kept.numbers or not theirs:
        return None
    needed_ms = MOST * cost_ms

    def both(column: str, part: str = "") -> tuple[float, float]:
        mine, *rest = (getattr(rank.kept, column) for rank in (own, *theirs))
        return median(mine[part] if part else mine), median(median(peer[part] if part else peer) for peer in rest)

    mine, usual = both("parts_ms", "gc")
    if mine - usual >= needed_ms:
        seen = f"Python's garbage collector takes {mine:.0f} ms per step here, and {usual:.0f} ms on the others"
        return SlowReason(SlowCause.COLLECTIONS, seen)
    (mine, on_core), (usual, usually) = _core_ms(own), map(median, zip(*map(_core_ms, theirs), strict=True))
    # Who computes more also waits more for a core that others use.
    if mine - usual >= needed_ms and on_core <= LARGER * usually:
        seen = f"its main thread waits {mine:.0f} ms per step for a core, and on the others {usual:.0f} ms"
        return SlowReason(SlowCause.HOST_LOAD, seen)
    mine, usual = both("input_numel")
    if usual and mine >= LARGER * usual:
        rows = both("input_rows")
        mine, usual, what = (*rows, "rows") if rows[0] != rows[1] else (mine, usual, "elements")
        return SlowReason(SlowCause.BATCH, f"its batches have {mine:.0f} {what}, and those of the others {usual:.0f}")
    mine, usual = both("parts_ms", "data")
    if mine - usual >= needed_ms:
        cpu = median(own.kept.cpu_ms["data"]) / mine
        how = f"{cpu:.0%} of it computing" if cpu >= COMPUTES else "waiting for files or workers"
        seen = f"its loader takes {mine:.0f} ms per batch ({how}), and on the others {usual:.0f} ms"
        return SlowReason(SlowCause.INPUT, seen)
    for part in ("forward", "backward"):
        mine, usual = both("parts_ms", part)
        if mine - usual >= needed_ms:
            cpu, usually = both("cpu_ms", part)
            cpu -= usually
            times = f"its {part} takes {mine:.0f} ms, and on the others {usual:.0f} ms; it uses"
            if cpu >= COMPUTES * (mine - usual):
                return SlowReason(SlowCause.WORK, f"{times} {cpu:.0f} ms more CPU time, so it computes more")
            seen = f"{times} only {cpu:.0f} ms more CPU time, so it waits or its CPU or GPU is slower"
            return SlowReason(SlowCause.COMPUTE, seen)
    return None


def shares_busy_cores(rank: Rank, others: Sequence[Rank], cost_ms: float) -> bool:
    """Return whether a rank is behind only because it waits for a core, as the other ranks do too."""
    # Which of them is behind then changes with what else runs on the machine. A loader that does not compute counts
    # too, if the main thread waits for a core as long: the loader's workers wait for the same cores.
    reason = find_slow_reason(rank, others, cost_ms)
    times = [other.speed.core_time for other in others if other.speed is not None]
    waits = [time.queued_ms / time.elapsed_ms if time is not None and time.elapsed_ms else 0.0 for time in times]
    if reason is None or not waits or rank.speed is None:
        return False
    if reason.cause is SlowCause.INPUT:
        kept = rank.speed.kept
        computes = median(kept.cpu_ms["data"]) >= COMPUTES * median(kept.parts_ms["data"])
        waits_as_long = _core_ms(rank.speed)[0] >= MOST * cost_ms
        return not computes and waits_as_long and median(waits) >= CROWDED
    return reason.cause is SlowCause.HOST_LOAD and median(waits) >= BUSY


def _core_ms(speed: Speed) -> tuple[float, float]:
    time = speed.core_time
    if time is None or not speed.count:
        return 0.0, 0.0
    return time.queued_ms / speed.count, time.on_core_ms / speed.count


@rule("DD610", "straggler", Severity.WARNING, "A rank is slow, and the others wait for it in every step")
@asked_if(Cause.NONE)
def check_straggler(job: JobState) -> Answer:
    """Report a rank that is last in nearly every step and costs the others a fifth of it."""
    pacings = find_pacings(job.facts)
    seen = [late for late in map(find_late, pacings) if late is not None]
    stepped = [rank.step_times for rank in job.facts.ranks if rank.step_times is not None]
    if not seen and (any(rank.device_times for rank in job.facts.ranks) or any(times.unknown for times in stepped)):
        return _judge_devices(job)
    if not pacings:
        return skipped("fewer than two ranks recorded steps")
    if not seen:
        most = max(pacing.steps for pacing in pacings)
        return skipped(f"{most} steps were recorded, fewer than {MIN_STEPS}")
    findings, costly, bound, contested = [], [], [], []
    for late in seen:
        if min(late.last_in.values()) < LATE_SHARE * late.pacing.steps or not late.matters(late.cost_ms):
            continue
        others = [job.ranks[number] for number in late.others]
        # Ranks that are late because they wait for a peer are not slow.
        usual = median(map(peer_wait_ms, others))
        waited = {number: max(0.0, peer_wait_ms(job.ranks[number]) - usual) for number in late.ranks}
        own = tuple(number for number in late.ranks if late.matters(late.cost_ms - waited[number]))
        if not own:
            continue
        slow = replace(late, ranks=own, last_in={number: late.last_in[number] for number in own})
        costly.append(slow)
        # If all ranks wait for their data, a rank that is a little behind finds no batch ready, and the others wait for
        # it. It hardly slows them down if their own workers are at the limit.
        times = [rank.fetch_times for rank in others]
        known = [time.busy_share for time in times if time is not None and time.batches >= MIN_STEPS]
        if len(known) == len(others) and median(known) > 1 - COST_SHARE:
            bound.append(slow)
        elif all(shares_busy_cores(job.ranks[number], others, slow.cost_ms) for number in own):
            contested.append(slow)
        else:
            findings.append(_straggler_problem(job, slow))
    if findings or not costly:
        return judged(findings)
    if contested:
        return unknown(
            "all ranks wait for cores that other programs use, so different ranks are late at different times"
        )
    numbers = sorted(number for late in bound for number in late.pacing.paces)
    return skipped(f"the loader workers of {rank_list(numbers)} are always busy, so no single rank is slow")


def _judge_devices(job: JobState) -> Answer:
    # The ranks of a group are not known once a job has ended well, except those of the group of all ranks.
    everyone = Group(DEFAULT_GROUP, tuple(range(job.world)))
    table = {(rank, DEFAULT_GROUP): everyone for rank in range(job.world)} | group_table(job.facts)
    ran_ms: dict[Group, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))  # by number and rank
    for rank in job.facts.ranks:
        for time in rank.device_times:
            group = table.get((rank.rank, time.group))
            if group is not None and len(group.members) > 1:
                ran_ms[group][time.seq][rank.rank] = time.ran_ms
    lates = (_late_device(job, group, times) for group, times in ran_ms.items())
    late = next((problem for problem in lates if problem is not None), None)
    if late is not None:
        return judged([late])
    detail = job.facts.debug_level.upper() == "DETAIL"  # there the waits are on the hosts
    if any(rank.device_times for rank in job.facts.ranks) and not detail:
        return passed()
    how = f"--debug-level OFF and {TIMING}" if detail else TIMING
    return unknown(f"waits between ranks on their devices are only measured with {how}")


def _straggler_problem(job: JobState, late: Late) -> Problem:
    # The phase in which a late rank loses most, its median time there, and the others', in milliseconds
    slow: dict[int, tuple[Phase, float, float]] = {}
    paces = late.pacing.paces
    usual_ms = {phase: median(paces[number].busy_ms[phase] for number in late.others) for phase in Phase}
    for number in late.ranks:
        lost_ms = {phase: paces[number].busy_ms[phase] - usual for phase, usual in usual_ms.items()}
        phase = max(lost_ms, key=lost_ms.__getitem__)
        slow[number] = phase, paces[number].busy_ms[phase], usual_ms[phase]
    by_phase = grouped((phase, number) for number, (phase, _, _) in slow.items())
    main = max(by_phase, key=lambda phase: len(by_phase[phase]))
    others = [job.ranks[number] for number in late.others]
    reason = find_slow_reason(job.ranks[late.ranks[0]], others, late.cost_ms)
    collects = reason is not None and reason.cause is SlowCause.COLLECTIONS
    # The lines at which a late rank was seen most in its slow phase, else that phase's own line. A rank that collects
    # garbage cannot be seen at it, and its line was noted.
    where: tuple[Place, ...] = ()
    for number, (phase, _, _) in slow.items():
        rank = job.ranks[number]
        noted = rank.speed.collected_at if collects and rank.speed is not None else None
        kinds = rank.recent_calls.kinds
        sites = [kind.site for kind in kinds if kind.op == _SITES.get(phase) and kind.site is not None]
        where += places(number, (noted,) if noted is not None else _phase_lines(rank, phase) or sites)
    late_words = say.who(job, late.ranks)
    lines = {(place.file, place.line) for place in where}
    at = f", {place_words(where[0])}" if where and (len(late.ranks) == 1 or len(lines) == 1) else ""
    often = f"{min(late.last_in.values())} of {late.pacing.steps}"
    explained = all(own - usual >= EXPLAINED * late.cost_ms for _, own, usual in slow.values())
    sure = explained and all(_phase_lines(job.ranks[number], phase) for number, (phase, _, _) in slow.items())
    spent = []
    for phase, ranks in by_phase.items():
        own, usual = median(slow[number][1] for number in ranks), slow[ranks[0]][2]
        spent.append(
            f"{rank_list(ranks)} {verb(ranks, 'spends', 'spend')} {_ms(own)} {_phase_words(job, late, phase)}, "
            f"and the others spend {_ms(usual)}"
        )
    return say.problem_of(
        job,
        late.ranks,
        confidence=Confidence.HIGH if sure else Confidence.MEDIUM,
        where=where,
        summary=f"{late_words} {verb(late.ranks, 'is', 'are')} slow {_phase_words(job, late, main)}{at}; "
        f"the others waited for {verb(late.ranks, 'it', 'them')} in {often} steps",
        evidence=(*_lateness(late), *spent, *((reason.seen,) if reason is not None else ()), *_worker_words(job, late)),
        fix=reason.cause.value if reason is not None else _FIXES[main],
        share=min(1.0, late.cost_ms / late.pacing.step_ms) if job.facts.speed_asked else None,
        step=None,
    )


def _lateness(late: Late) -> list[str]:
    by_count = grouped((times, number) for number, times in late.last_in.items())
    counts = sorted(by_count.items())
    found = [f"{rank_list(ranks)} came last in {times} of {late.pacing.steps} steps" for times, ranks in counts]
    step = late.pacing.step_ms
    waited = [late.pacing.paces[number].waited_ms for number in late.others]
    between = f", {_ms(min(waited))} to {_ms(max(waited))}" if _ms(min(waited)) != _ms(max(waited)) else ""
    found.append(
        f"{rank_list(late.others)} waited {_ms(late.cost_ms)} longer than {rank_list(late.ranks)} (median), "
        f"{late.cost_ms / step:.0%} of a {_ms(step)} step; they wait {_ms(median(waited))} per step{between}"
    )
    return found


def _worker_words(job: JobState, late: Late) -> list[str]:
    groups = [[job.ranks[number].fetch_times for number in numbers] for numbers in (late.ranks, late.others)]
    own, theirs = ([times for times in group if times is not None and times.batches >= MIN_STEPS] for group in groups)
    if not own or not theirs:
        return []
    words = (
        f"a loader worker of {rank_list(late.ranks)} takes {_ms(median(rank.batch_ms for rank in own))} per batch and "
        f"is busy {median(rank.busy_share for rank in own):.0%} of the time; on the others it takes "
        f"{_ms(median(rank.batch_ms for rank in theirs))} and is busy {median(rank.busy_share for rank in theirs):.0%}"
    )
    return [words]


def _phase_words(job: JobState, late: Late, phase: Phase) -> str:
    """Return the name of a phase. If no forward was seen, "before forward" covers everything but backward."""
    times = job.ranks[late.ranks[0]].step_times
    if phase is not Phase.BEFORE or times is None or any(times.phases_us[Phase.FORWARD]):
        return _WORDS[phase]
    return "between collectives" if times.ends_with is StepEnd.COLLECTIVE else "outside backward"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _phase_lines(rank: Rank, phase: Phase) -> tuple[Frame, ...]:
    seen = [line for line in rank.lines_seen if line.phase is phase and not line.in_child]
    own = [line for line in seen if not line.calls_module]
    if not own:
        return ()
    least = SECOND_LINE * own[0].times
    often = [line.frame for line in own if line.times >= least]
    loaders = {_line_key(kind.site) for kind in rank.recent_calls.kinds if kind.op == "next_batch" and kind.site}
    if phase is Phase.BEFORE and _line_key(often[0]) in loaders:
        # An idle forked worker still has its parent's line on its stack. A spawned worker first runs the script's
        # module, which imports torch and makes no batch. Neither counts.
        keyed = ((_line_key(line.frame), line) for line in rank.lines_seen if line.in_child)
        found = grouped((key, line) for key, line in keyed if key not in loaders)
        most = sorted(
            found.values(),
            key=lambda lines: (lines[0].frame.function == "<module>", -sum(line.times for line in lines)),
        )
        return (*tuple(lines[0].frame for lines in most)[:1], *often)
    if phase not in _OUTSIDE:
        return tuple(often)
    often_there = [line.frame for line in seen if line.calls_module and line.times >= least]
    calls = [frame for frame in often_there if _line_key(frame) not in loaders]
    return (*calls[:1], *often)


def _line_key(frame: Frame) -> tuple[str, int]:
    return frame.file, frame.line
