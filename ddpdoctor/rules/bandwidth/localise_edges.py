"""Among measured edges between ends (ranks, hosts): which end is slow with everyone, and which edge is slow alone.

Everything is compared within one turn, in which each edge was visited once: what slows the whole machine for a while
slows all of them, and what slows one of them for a moment does so in few turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class Measure(str, Enum):
    """What of an edge is looked at."""

    BANDWIDTH = "bandwidth"
    LATENCY = "latency"


SLOW = 2.0
"""Ours: so many times slower than usual is slow. A link that came up at half its rate is at 2. Between healthy pairs of
one kind, by the medians of nine turns, we have seen up to 1.6, on two cores in use by others."""
EVERYONE = 0.75
"""Ours: the share of its edges that must be slow for an end to be slow with everyone: two of two, three of three, and
from five ends on all but one in four, since others may have their own trouble."""
MOST_TURNS = 2 / 3
"""Ours: in so many turns an end must be slow with everyone. Where a healthy edge looks slow in one turn of three by
chance, that befalls all edges of one end in six turns of nine less than once in ten thousand times."""
NEARLY_ALL_TURNS = 0.8
"""Ours: in so many turns an edge must be slow, which has no other edges to confirm it."""
LEAST_TURNS = 3
MILD, WIDE = 1.5, 0.5
"""Ours: where several edges are this many times slower than others, and they touch more than this share of the ends,
that is no fault of links but how the machine is wired: pairs across two sockets, or GPUs of which some have no NVLink
to each other."""

End = TypeVar("End", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What ranks reached that were measured together: one value a turn."""

    busbws_gb_s: tuple[float, ...]
    latencies_us: tuple[float, ...]

    @property
    def turns(self) -> int:
        """In how many turns it was measured; a bench that was cut short has fewer of some."""
        return min(len(self.busbws_gb_s), len(self.latencies_us))

    def cost(self, measure: Measure, turn: int) -> float:
        """Return what is the higher the slower it was in a turn."""
        return self.latencies_us[turn] if measure is Measure.LATENCY else 1.0 / max(self.busbws_gb_s[turn], 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge(Generic[End]):
    """Two ends, measured by themselves."""

    ends: tuple[End, End]
    series: Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """By how much something is slower than usual."""

    measure: Measure
    low: float
    high: float
    """The range of the medians of what is slow: GB/s, or microseconds."""
    usual: float
    """The median of what it was compared with."""
    turns: int
    of: int
    """It was slow in so many of so many turns."""

    @property
    def ratio(self) -> float:
        """How many times slower, where it is the least so."""
        least = self.low / self.usual if self.measure is Measure.LATENCY else self.usual / max(self.high, 1e-9)
        return max(least, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(Generic[End]):
    """An end, or the two of an edge, and in what it is slow: the worst first, never empty."""

    ends: tuple[End, ...]
    slowness: tuple[Slowness, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[End]):
    """What is slow among edges of one kind."""

    ends: tuple[Slow[End], ...] = ()
    edges: tuple[Slow[End], ...] = ()
    wiring: int = 0
    """How many edges are slow by themselves where they are too many to be faults; ``edges`` is empty then."""


def can_judge(edges: Iterable[Edge[End]]) -> bool:
    """Whether there is anything to compare with: three ends, each with two edges. One edge has two ends to blame."""
    known = tuple(edges)
    ends = sum(len(own) >= 2 for own in _by_end(known).values())
    return ends >= 3 and min(edge.series.turns for edge in known) >= LEAST_TURNS


def find_slow(edges: Iterable[Edge[End]]) -> Found[End]:
    """Name the slow ends, the worst first; then, among the others, the edges that are slow for both of their ends."""
    left = tuple(edges)
    ends: list[Slow[End]] = []
    while can_judge(left):
        worst = max((_judge_end(end, own, left) for end, own in _by_end(left).items()), key=_severity)
        if not worst.slowness:
            break
        ends.append(worst)
        left = tuple(edge for edge in left if worst.ends[0] not in edge.ends)
    mild = _slow_edges(left, MILD)
    touched = {end for edge in mild for end in edge.ends}
    wired = len(mild) > 1 and len(touched) > WIDE * len(_by_end(left))
    edges_slow = () if wired else _slow_edges(left, SLOW)
    return Found(ends=tuple(ends), edges=edges_slow, wiring=len(mild) if wired else 0)


def compare(own: Sequence[Series], others: Sequence[Series]) -> tuple[Slowness, ...]:
    """Return in what three quarters of ``own`` are slower than the median of ``others``, in most turns."""
    found = []
    for measure in Measure:

        def slow(turn: int, measure: Measure = measure) -> bool:
            usual = statistics.median(other.cost(measure, turn) for other in others)
            return sum(one.cost(measure, turn) >= SLOW * usual for one in own) >= EVERYONE * len(own)

        found.append(_tell(measure, own, others, slow, MOST_TURNS))
    return _worst_first(found)


def _judge_end(end: End, own: Sequence[Edge[End]], edges: Iterable[Edge[End]]) -> Slow[End]:
    others = [edge.series for edge in edges if end not in edge.ends]
    enough = len(own) >= 2 and bool(others)
    return Slow(ends=(end,), slowness=compare([edge.series for edge in own], others) if enough else ())


def _slow_edges(edges: Sequence[Edge[End]], times: float) -> tuple[Slow[End], ...]:
    by_end = _by_end(edges)
    slow = [judged for judged in (_judge_edge(edge, by_end, times) for edge in edges) if judged.slowness]
    return tuple(sorted(slow, key=_severity, reverse=True))


def _judge_edge(edge: Edge[End], by_end: Mapping[End, Sequence[Edge[End]]], times: float) -> Slow[End]:
    """Compare an edge with the other edges of each of its two ends: in bandwidth it must be slow beside both.

    Not in latency: a thread that always wakes late beside just one other is a matter of cores, and a link that
    answers late loses bandwidth too.
    """
    beside = [[other.series for other in by_end[end] if other is not edge] for end in edge.ends]
    if not all(beside):
        return Slow(ends=edge.ends, slowness=())
    measure, series = Measure.BANDWIDTH, edge.series

    def slow(turn: int) -> bool:
        usual = max(statistics.median(other.cost(measure, turn) for other in others) for others in beside)
        return series.cost(measure, turn) >= times * usual

    others = [other for group in beside for other in group]
    return Slow(ends=edge.ends, slowness=_worst_first([_tell(measure, [series], others, slow, NEARLY_ALL_TURNS)]))


def _tell(
    measure: Measure,
    own: Sequence[Series],
    others: Sequence[Series],
    slow: Callable[[int], bool],
    least_share: float,
) -> Slowness | None:
    turns = min(series.turns for series in (*own, *others))
    count = sum(slow(turn) for turn in range(turns))
    if turns < LEAST_TURNS or count < least_share * turns:
        return None
    reached = [_middle(measure, series) for series in own]
    usual = statistics.median(_middle(measure, series) for series in others)
    return Slowness(measure=measure, low=min(reached), high=max(reached), usual=usual, turns=count, of=turns)


def _middle(measure: Measure, series: Series) -> float:
    return statistics.median(series.latencies_us if measure is Measure.LATENCY else series.busbws_gb_s)


def _worst_first(found: Iterable[Slowness | None]) -> tuple[Slowness, ...]:
    there = [slowness for slowness in found if slowness is not None]
    return tuple(sorted(there, key=lambda slowness: slowness.ratio, reverse=True))


def _severity(slow: Slow[End]) -> float:
    return slow.slowness[0].ratio if slow.slowness else 0.0


def _by_end(edges: Iterable[Edge[End]]) -> dict[End, list[Edge[End]]]:
    found: dict[End, list[Edge[End]]] = {}
    for edge in edges:
        for end in edge.ends:
            found.setdefault(end, []).append(edge)
    return found
