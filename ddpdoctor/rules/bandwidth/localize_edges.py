"""Given measured edges between ends (ranks, hosts), finds ends that are slow with everyone, and edges slow alone.

Everything is compared within one turn, in which each edge was measured once. A slowdown of the whole machine affects
all edges of a turn, and a short disturbance of one edge affects only a few turns.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from ddpdoctor.model.words import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SLOW = 2.0
"""Our choice: this many times slower than usual is slow. A link that came up at half its rate is at 2. Between healthy
pairs of one kind, by the medians of nine turns, we have seen up to 1.6, on two cores that others also used."""
EVERYONE = 0.75
"""Our choice: the share of an end's edges that must be slow for the end to be slow with everyone: two of two, three of
three, and from five ends on all but one in four, since others may have problems of their own."""
MOST_TURNS = 2 / 3
"""Our choice: the share of turns in which an end must be slow with everyone. If a healthy edge looks slow in one turn
of three by chance, all edges of one end do so in six turns of nine less than once in ten thousand times."""
NEARLY_ALL_TURNS = 0.8
"""Our choice: the share of turns in which a single edge, or a node by itself, must be slow: nothing else confirms
it."""
LEAST_TURNS = 3
MILD, WIDE = 1.5, 0.5
"""Our choice: if several edges are this many times slower than others, and they touch more than this share of the ends,
the cause is not faulty links but the wiring of the machine: pairs across two sockets, or GPUs without NVLink between
some of them."""
End = TypeVar("End", bound=Hashable)


class Measure(str, Enum):
    """The property of an edge that is compared."""

    BANDWIDTH = "bandwidth"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What ranks reached when measured together: one value per turn."""

    busbws_gb_s: tuple[float, ...]
    latencies_us: tuple[float, ...]

    @property
    def turns(self) -> int:
        """The number of turns in which it was measured; after an interrupted bench some series have fewer."""
        return min(len(self.busbws_gb_s), len(self.latencies_us))

    def cost(self, measure: Measure, turn: int) -> float:
        """Return a cost for one turn: the slower, the higher."""
        return self.latencies_us[turn] if measure is Measure.LATENCY else 1.0 / max(self.busbws_gb_s[turn], 1e-9)


Rows = dict[Measure, tuple[list[float], ...]]
"""Sorted costs by turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge(Generic[End]):
    """Two ends, measured alone."""

    ends: tuple[End, End]
    series: Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How much slower than usual something is."""

    measure: Measure
    low: float
    high: float
    """The range of the medians of the slow ones, in GB/s or microseconds."""
    usual: float
    """The median of those it was compared with."""
    slow_turns: int
    turns: int
    """The number of all turns."""

    @property
    def ratio(self) -> float:
        """How many times slower than usual the least slow one is."""
        least = self.low / self.usual if self.measure is Measure.LATENCY else self.usual / max(self.high, 1e-9)
        return max(least, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(Generic[End]):
    """A slow end, or the two ends of a slow edge, and in what it is slow: the worst first, never empty."""

    ends: tuple[End, ...]
    slowness: tuple[Slowness, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowEdges(Generic[End]):
    """The slow ends and edges among edges of one kind."""

    ends: tuple[Slow[End], ...] = ()
    edges: tuple[Slow[End], ...] = ()
    wiring: int = 0
    """How many edges are slow by themselves if they are too many to be faults; ``edges`` is then empty."""


def can_judge(edges: Iterable[Edge[End]]) -> bool:
    """Whether there is enough to compare: three ends with two edges each. With one edge, either end may be to blame."""
    known = tuple(edges)
    ends = sum(len(own) >= 2 for own in _by_end(known).values())
    return ends >= 3 and min(edge.series.turns for edge in known) >= LEAST_TURNS


def find_slow(edges: Iterable[Edge[End]]) -> SlowEdges[End]:
    """Find the slow ends, the worst first, and then among the others the edges that are slow for both ends."""
    left = tuple(edges)
    ends: list[Slow[End]] = []
    while can_judge(left):
        worst = _worst_end(left)
        if worst is None:
            break
        ends.append(worst)
        left = tuple(edge for edge in left if worst.ends[0] not in edge.ends)
    mild = _slow_edges(left, MILD)
    touched = {end for edge in mild for end in edge.ends}
    wired = len(mild) > 1 and len(touched) > WIDE * len(_by_end(left))
    return SlowEdges(ends=tuple(ends), edges=() if wired else _slow_edges(left, SLOW), wiring=len(mild) if wired else 0)


def compare(own: Sequence[Turns], others: Sequence[Turns], rows: Rows) -> tuple[Slowness, ...]:
    """Return in what three quarters of ``own`` are slower than the median of ``others``, in enough of the turns.

    ``rows`` are the rows of ``own`` and ``others`` together. A single series must be slow in nearly all turns.
    """
    if len(others) == 0:
        return ()
    found = []
    for measure in Measure:
        slow = 0
        for turn, row in enumerate(rows[measure]):
            costs = sorted(one.cost(measure, turn) for one in own)
            least = SLOW * median_without(row, costs)
            slow += len(costs) - bisect_left(costs, least) >= EVERYONE * len(costs)
        if slow >= (MOST_TURNS if len(own) > 1 else NEARLY_ALL_TURNS) * len(rows[measure]):
            found.append(_slowness(measure, own, others, slow, len(rows[measure])))
    return tuple(sorted(found, key=lambda slowness: slowness.ratio, reverse=True))


def make_rows(series: Sequence[Turns]) -> Rows:
    """Sort the costs of all series, by measure and turn, for the turns that all of them have."""
    turns = range(min((one.turns for one in series), default=0))
    return {measure: tuple(sorted(one.cost(measure, turn) for one in series) for turn in turns) for measure in Measure}


def median_without(ordered: Sequence[float], own: Sequence[float]) -> float:
    """Return the median of the sorted values that remain without ``own``, which is sorted too."""
    count = len(ordered) - len(own)
    return (_value_without(ordered, own, (count - 1) // 2) + _value_without(ordered, own, count // 2)) / 2


def _value_without(ordered: Sequence[float], own: Sequence[float], place: int) -> float:
    index = place
    while (beyond := place + bisect_right(own, ordered[index])) > index:
        index = beyond
    return ordered[index]


def _worst_end(edges: Sequence[Edge[End]]) -> Slow[End] | None:
    rows = make_rows([edge.series for edge in edges])
    slow = []
    for end, own in _by_end(edges).items():
        others = [edge.series for edge in edges if end not in edge.ends]
        slowness = compare([edge.series for edge in own], others, rows) if len(own) >= 2 else ()
        if slowness:
            slow.append(Slow(ends=(end,), slowness=slowness))
    return max(slow, key=_severity, default=None)


def _slow_edges(edges: Sequence[Edge[End]], times: float) -> tuple[Slow[End], ...]:
    """Compare each edge's bandwidth with the other edges of its two ends. It must be slower than both.

    Latency is not compared: a thread that wakes late for just one other rank is a matter of cores, and a link that
    answers late loses bandwidth too.
    """
    by_end = {end: [edge.series for edge in own] for end, own in _by_end(edges).items()}
    rows = {end: make_rows(own)[Measure.BANDWIDTH] for end, own in by_end.items()}
    slow = []
    for edge in edges:
        one, other = (rows[end] for end in edge.ends)
        turns = min(len(one), len(other))
        count = sum(_is_slow(edge.series, turn, (one[turn], other[turn]), times) for turn in range(turns))
        if turns >= LEAST_TURNS and count >= NEARLY_ALL_TURNS * turns:
            beside = [series for end in edge.ends for series in by_end[end] if series is not edge.series]
            slowness = _slowness(Measure.BANDWIDTH, [edge.series], beside, count, turns)
            slow.append(Slow(ends=edge.ends, slowness=(slowness,)))
    return tuple(sorted(slow, key=_severity, reverse=True))


def _is_slow(series: Turns, turn: int, rows: Sequence[Sequence[float]], times: float) -> bool:
    cost = series.cost(Measure.BANDWIDTH, turn)
    return all(len(row) > 1 and cost >= times * median_without(row, (cost,)) for row in rows)


def _slowness(measure: Measure, own: Sequence[Turns], others: Sequence[Turns], slow_turns: int, turns: int) -> Slowness:
    reached = [_middle(measure, series) for series in own]
    usual = statistics.median(_middle(measure, series) for series in others)
    return Slowness(
        measure=measure, low=min(reached), high=max(reached), usual=usual, slow_turns=slow_turns, turns=turns
    )


def _middle(measure: Measure, series: Turns) -> float:
    return statistics.median(series.latencies_us if measure is Measure.LATENCY else series.busbws_gb_s)


def _severity(slow: Slow[End]) -> float:
    return slow.slowness[0].ratio


def _by_end(edges: Iterable[Edge[End]]) -> dict[End, list[Edge[End]]]:
    return grouped((end, edge) for edge in edges for end in edge.ends)
