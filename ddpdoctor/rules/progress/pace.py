"""Which ranks of a group come late to its steps, and what that costs the others.

Ranks on several hosts share no clock, so arrivals are compared by waits: all members end a step together, and the one
that waits least came last. The time that even the last one waits is the communication itself. On a GPU the kernels are
compared: one runs from the time its own rank comes until the last rank comes, so the last rank's is the shortest. torch
times kernels only if asked to (``TORCH_NCCL_ENABLE_TIMING=1``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import POINT_TO_POINT
from ddpdoctor.model.steps import Pace, Phase, StepTimes, pace_of, step_totals, wait_totals
from ddpdoctor.model.words import grouped

from ddpdoctor.rules.progress.groups import DEFAULT_GROUP, Group, group_table, own_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.facts import Job, Rank

    from ddpdoctor.rules.progress.job_state import JobState


MIN_STEPS = 20
"""Below this number of steps nothing is said: the design's figure."""
LATE_SHARE = 0.8
"""Share of the steps in which a rank must come last: the design's figure."""
COST_SHARE = 0.2
"""Share of the median step that the others must wait for it: the design's figure."""
COST_MS = 20.0
"""Milliseconds that the others must wait at the median: the design's figure."""
CLEAR_GAP = 0.5
"""Ranks are separated at the first gap between their waits that is at least this share of the widest gap. Our choice:
two ranks that are slow for the same reason differ by less. If one rank is slow and another is slower, the others wait
only for the slower one."""
OUTLIERS = 0.01
"""Share of the other ranks that may still come later in a step. Our choice: of a thousand, one is late by chance in any
step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Members of a group whose steps can be compared."""

    steps: int
    """How many steps all of them have."""
    waits_ms: Mapping[int, tuple[float, ...]]
    """The waits of each rank, one for each of those steps."""
    paces: Mapping[int, Pace]
    step_ms: float
    """The median step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Ranks that the others in their group wait for."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    last_in: Mapping[int, int]
    """For each late rank, the number of steps in which it came after all the others."""
    cost_ms: float
    """How long the others wait for them in the median step."""
    pacing: Pacing

    @property
    def is_costly(self) -> bool:
        """Return whether they are late so often, and for so long, that it matters."""
        often = min(self.last_in.values()) >= LATE_SHARE * self.pacing.steps
        return often and self.matters(self.cost_ms)

    def matters(self, cost_ms: float) -> bool:
        """Return whether so long a wait in each step is worth a finding."""
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
    return tuple(_pacing(members) for members in together.values() if len(members) > 1)


def _pacing(members: Mapping[int, StepTimes]) -> Pacing:
    common = set.intersection(*(set(times.numbers) for times in members.values()))
    paces = {number: pace_of(times) for number, times in members.items()}
    waits = {number: _common(times, wait_totals(times), common) for number, times in members.items()}
    totals = [_common(times, step_totals(times), common) for times in members.values()]
    return Pacing(
        steps=len(common),
        waits_ms=waits,
        paces={number: pace for number, pace in paces.items() if pace is not None},
        step_ms=median(map(median, totals)) if common else 0.0,
    )


def _common(times: StepTimes, values_us: Iterable[int], common: set[int]) -> tuple[float, ...]:
    return tuple(value / 1e3 for number, value in zip(times.numbers, values_us, strict=True) if number in common)


def find_late(pacing: Pacing) -> Late | None:
    """Return the ranks that wait least, at most half of all, or None if there are too few steps to decide."""
    if pacing.steps < MIN_STEPS:
        return None
    usual = {number: median(waits) for number, waits in pacing.waits_ms.items()}
    order = sorted(usual, key=lambda number: usual[number])
    split = _split([usual[number] for number in order])
    late, others = order[:split], order[split:]
    return Late(
        ranks=tuple(sorted(late)),
        others=tuple(sorted(others)),
        last_in=_last_in(pacing, late, others),
        cost_ms=_cost_ms(pacing, late, others),
        pacing=pacing,
    )


def _split(waits_ms: Sequence[float]) -> int:
    """Return how many of the ranks, sorted by their median waits, wait clearly less than the rest."""
    gaps = [after - before for before, after in pairwise(waits_ms)][: len(waits_ms) // 2]
    widest = max(gaps)
    return 1 + next(i for i, gap in enumerate(gaps) if gap >= CLEAR_GAP * widest)


def _last_in(pacing: Pacing, late: Iterable[int], others: Sequence[int]) -> dict[int, int]:
    spared = int(len(others) * OUTLIERS)
    first = [sorted(waits)[spared] for waits in zip(*(pacing.waits_ms[number] for number in others), strict=True)]
    return {
        number: sum(own < least for own, least in zip(pacing.waits_ms[number], first, strict=True)) for number in late
    }


def _cost_ms(pacing: Pacing, late: Iterable[int], others: Iterable[int]) -> float:
    """Return the median cost of a step for the median other rank."""
    own = map(max, zip(*(pacing.waits_ms[number] for number in late), strict=True))
    theirs = map(median, zip(*(pacing.waits_ms[number] for number in others), strict=True))
    costs: list[float] = [max(0.0, waited - least) for waited, least in zip(theirs, own, strict=True)]
    return median(costs)


def slow_phase(late: Late, rank: int) -> tuple[Phase, float, float]:
    """Return the phase in which a late rank loses most, its median time there, and the others', in milliseconds."""
    paces = late.pacing.paces
    usual = [median(paces[number].busy_ms[phase] for number in late.others) for phase in Phase]
    phase = max(Phase, key=lambda phase: paces[rank].busy_ms[phase] - usual[phase])
    return phase, paces[rank].busy_ms[phase], usual[phase]


def peer_wait_ms(rank: Rank) -> float:
    """Return how long blocking calls to a single peer take in the median step: ``StepTimes`` leaves these waits out."""
    times = rank.step_times
    log = pack_calls(rank.recent_calls)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LateDevice:
    """A rank whose kernels are the shortest of its group, in step after step."""

    rank: int
    group: Group
    last_in: int
    """In how many collectives it came after all others, by ``COST_MS`` or more."""
    steps: int
    """About how many steps the timed collectives cover."""
    cost_ms: float
    """The median time that the others waited in those collectives."""
    step_ms: float
    """Upper bound of the usual step: it includes the start of the job."""


def find_late_device(job: JobState) -> LateDevice | None:
    """Return the first rank that the others wait for on their devices, or None if there is none or no times exist."""
    for group, times in _times(job).items():
        found = _late_in(job, group, times)
        if found is not None:
            return found
    return None


def _times(job: JobState) -> dict[Group, dict[int, dict[int, float]]]:
    """Return how many milliseconds each collective ran, by group, number and rank.

    The ranks of a group are not known once a job has ended well, except those of the group of all ranks.
    """
    table = group_table(job.facts)
    table |= {
        (rank, DEFAULT_GROUP): Group(DEFAULT_GROUP, tuple(range(job.world)))
        for rank in range(job.world)
        if (rank, DEFAULT_GROUP) not in table
    }
    found: dict[Group, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for rank in job.facts.ranks:
        for time in rank.device_times:
            group = table.get((rank.rank, time.group))
            if group is not None and len(group.members) > 1:
                found[group][time.seq][rank.rank] = time.ran_ms
    return found


def _late_in(job: JobState, group: Group, times: Mapping[int, Mapping[int, float]]) -> LateDevice | None:
    whole = [ran for ran in times.values() if len(ran) == len(group.members)]
    a_step, step_ms = _pace(job, group)
    steps = int(len(whole) / a_step)
    if steps < MIN_STEPS:
        return None
    firsts = (sorted(ran.items(), key=lambda item: item[1])[:2] for ran in whole)
    costs = grouped((rank, second - least) for (rank, least), (_, second) in firsts if second - least >= COST_MS)
    often = Counter({number: len(found) for number, found in costs.items()}).most_common(1)
    if not often or often[0][1] < LATE_SHARE * steps:
        return None
    number, last_in = often[0]
    cost_ms = median(costs[number])
    if cost_ms < COST_SHARE * step_ms:
        return None
    return LateDevice(rank=number, group=group, last_in=last_in, steps=steps, cost_ms=cost_ms, step_ms=step_ms)


def _pace(job: JobState, group: Group) -> tuple[float, float]:
    """Return how many collectives of a group make up a step, and the length of a step in ms; both are upper bounds."""
    members = [job.rank(number) for number in group.members if number in job.states]
    steps = max(1, min((rank.steps for rank in members), default=1))
    begun = [state.enqueued for rank in members if (state := own_state(rank, group.name)) is not None]
    lived_ns = [(rank.ended_ns or job.time_ns) - (rank.started_ns or 0) for rank in members]
    return max(1.0, max(begun, default=0) / steps), max(lived_ns, default=0) / 1e6 / steps
