"""Finds ranks that wait for each other in a circle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Circle, Spot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.evidence import Operation

_Link = tuple[int, "Operation", int]


def find_circle(links: Iterable[tuple[int, Operation, int | None]], source: str = "") -> Circle | None:
    """Return the shortest way in which ranks wait for each other, or None if someone waits for nobody.

    Args:
        links: A rank, what it waits in, and for whom.
        source: The name of a file that shows it.
    """
    waits: dict[int, dict[int, Operation]] = {}
    for rank, operation, other in links:
        if other is not None and other != rank:
            waits.setdefault(rank, {}).setdefault(other, operation)
    if any(other not in waits for others in waits.values() for other in others):
        return None
    ways = [way for rank in sorted(waits) if (way := _way_back(waits, rank))]
    if not ways:
        return None
    shortest = min(len(way) for way in ways)
    return Circle(links=tuple(next(way for way in ways if len(way) == shortest)), spot=Spot(source=source))


def _way_back(waits: dict[int, dict[int, Operation]], start: int) -> list[_Link]:
    """Return the shortest way from a rank to itself, by breadth first search."""
    before: dict[int, int] = {}
    queue = [start]
    for rank in queue:
        for other in sorted(waits.get(rank, {})):
            if other == start:
                return _unwind(waits, before, start, rank)
            if other not in before:
                before[other] = rank
                queue.append(other)
    return []


def _unwind(waits: dict[int, dict[int, Operation]], before: dict[int, int], start: int, last: int) -> list[_Link]:
    ranks = [last]
    while ranks[-1] != start:
        ranks.append(before[ranks[-1]])
    ranks.reverse()
    return [(rank, waits[rank][other], other) for rank, other in zip(ranks, [*ranks[1:], start], strict=True)]
