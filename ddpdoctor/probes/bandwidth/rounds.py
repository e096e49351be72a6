"""Schedules every pair once, in rounds of pairs that share no member."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

End = TypeVar("End")


def circle_rounds(ends: Sequence[End]) -> tuple[tuple[tuple[End, End], ...], ...]:
    """Return n - 1 rounds of n / 2 pairs, or for odd n, n rounds with a different end sitting out each time.

    This is the circle method: one end stays, the others rotate around the table, and opposite seats form a pair. A pair
    keeps the order in which its ends were given.
    """
    if len(ends) < 2:
        return ()
    seats = len(ends) + len(ends) % 2
    table = list(range(seats))
    rounds = []
    for _ in range(seats - 1):
        facing = sorted((min(pair), max(pair)) for pair in zip(table, reversed(table[seats // 2 :]), strict=False))
        rounds.append(tuple((ends[first], ends[second]) for first, second in facing if second < len(ends)))
        table = [table[0], table[-1], *table[1:-1]]
    return tuple(rounds)
