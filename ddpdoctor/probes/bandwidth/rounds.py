"""Who meets whom when: every pair once, in rounds of pairs that share nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

End = TypeVar("End")


def circle_rounds(ends: Sequence[End]) -> tuple[tuple[tuple[End, End], ...], ...]:
    """Return n - 1 rounds of n / 2 pairs; with an odd number n rounds, in each of which another end has a bye.

    The circle method: one end stays, the others walk round the table, and who sit face to face are a pair. A pair
    has its ends in the order in which they were given.
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
