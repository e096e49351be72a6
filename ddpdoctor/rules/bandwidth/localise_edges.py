"""Among measured edges between ends (ranks, hosts): which end is slow with everyone, and which edge is slow alone."""

from __future__ import annotations

import statistics
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Measure(str, Enum):
    """What of an edge is looked at."""

    BANDWIDTH = "bandwidth"
    LATENCY = "latency"


SLOW = {Measure.BANDWIDTH: 2.0, Measure.LATENCY: 3.0}
"""Ours: how many times slower than usual is slow. Among healthy pairs of one kind, at the best of several visits, the
widest ratio we have seen is 1.5 for bandwidth and 1.6 for latency, on a machine of two cores in use by others. A link
that came up at half its rate is at 2.0; a core shared with another process makes latency five times as long."""
EVERYONE = 0.75
"""Ours: the share of its edges that must be slow for an end to be slow with everyone: two of two, three of three, and
from five ends on all but one in four, since others may have their own trouble."""
SEVERAL = 0.25
"""Ours: where more than this share of the edges is slow by themselves, and more than one, that is no fault of links but
how the machine is wired: pairs across two sockets, or GPUs of which some have no NVLink to each other."""

End = TypeVar("End", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge(Generic[End]):
    """Two ends, measured by themselves."""

    ends: tuple[End, End]
    busbw_gb_s: float
    latency_us: float

    def cost(self, measure: Measure) -> float:
        """Return what is the higher the slower the edge is."""
        return self.latency_us if measure is Measure.LATENCY else 1.0 / max(self.busbw_gb_s, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """By how much something is slower than usual."""

    measure: Measure
    low: float
    high: float
    """The range of its own edges: GB/s, or microseconds."""
    usual: float
    """The median of the others."""
    ratio: float
    """How many times slower, at its median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(Generic[End]):
    """An end, or the two of an edge, and in what it is slow: the worst first, never empty."""

    ends: tuple[End, ...]
    slowness: tuple[Slowness, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[End]):
    """What is slow among edges of one kind."""

    ends: tuple[Slow[End], ...]
    edges: tuple[Slow[End], ...]
    wiring: int
    """How many edges are slow by themselves where they are too many to be faults; they are not in ``edges`` then."""


def can_judge(edges: Iterable[Edge[End]]) -> bool:
    """Whether there is anything to compare with: three ends, each with two edges. One edge has two ends to blame."""
    return sum(len(own) >= 2 for own in _by_end(edges).values()) >= 3


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
    by_end = _by_end(left)
    slow = [judged for judged in (_judge_edge(edge, by_end) for edge in left) if judged.slowness]
    wiring = len(slow) if len(slow) > max(1.0, SEVERAL * len(left)) else 0
    slow.sort(key=_severity, reverse=True)
    return Found(ends=tuple(ends), edges=() if wiring else tuple(slow), wiring=wiring)


def worst_first(found: Iterable[Slowness | None]) -> tuple[Slowness, ...]:
    """Return what there is of these, that which is slower by the most first."""
    there = [slowness for slowness in found if slowness is not None]
    return tuple(sorted(there, key=lambda slowness: slowness.ratio, reverse=True))


def _judge_end(end: End, mine: Sequence[Edge[End]], edges: Iterable[Edge[End]]) -> Slow[End]:
    others = [edge for edge in edges if end not in edge.ends]
    found = []
    for measure, threshold in SLOW.items():
        if len(mine) >= 2 and others:
            usual = statistics.median(edge.cost(measure) for edge in others)
            slow = [edge for edge in mine if edge.cost(measure) >= threshold * usual]
            if len(slow) >= EVERYONE * len(mine):
                found.append(_compare(measure, mine, usual))
    return Slow(ends=(end,), slowness=worst_first(found))


def _judge_edge(edge: Edge[End], by_end: Mapping[End, Sequence[Edge[End]]]) -> Slow[End]:
    """Compare an edge with the other edges of each of its two ends: it must be slow beside both."""
    beside = [[other for other in by_end[end] if other is not edge] for end in edge.ends]
    found = []
    for measure, threshold in SLOW.items():
        if all(beside):
            usual = max(statistics.median(other.cost(measure) for other in others) for others in beside)
            if edge.cost(measure) >= threshold * usual:
                found.append(_compare(measure, [edge], usual))
    return Slow(ends=edge.ends, slowness=worst_first(found))


def _compare(measure: Measure, mine: Sequence[Edge[End]], usual: float) -> Slowness:
    costs = [edge.cost(measure) for edge in mine]
    shown = sorted(cost if measure is Measure.LATENCY else 1.0 / cost for cost in costs)
    return Slowness(
        measure=measure,
        low=shown[0],
        high=shown[-1],
        usual=usual if measure is Measure.LATENCY else 1.0 / usual,
        ratio=statistics.median(costs) / usual,
    )


def _severity(slow: Slow[End]) -> float:
    return slow.slowness[0].ratio if slow.slowness else 0.0


def _by_end(edges: Iterable[Edge[End]]) -> dict[End, list[Edge[End]]]:
    found: dict[End, list[Edge[End]]] = {}
    for edge in edges:
        for end in edge.ends:
            found.setdefault(end, []).append(edge)
    return found
