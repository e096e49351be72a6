"""Groups ranks and other things by what they have, and finds what more than half of them have."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

Value = TypeVar("Value", bound="Hashable")
Item = TypeVar("Item")


def grouped(pairs: Iterable[tuple[Value, Item]]) -> dict[Value, list[Item]]:
    """Return the items of each value, both in the order in which they came."""
    found: dict[Value, list[Item]] = {}
    for value, item in pairs:
        found.setdefault(value, []).append(item)
    return found


def group_alike(values: Mapping[int, Value]) -> list[tuple[Value, tuple[int, ...]]]:
    """Return each value with the ranks or files that have it: the most first, the lowest number first among equals."""
    found = grouped((value, number) for number, value in sorted(values.items(), key=lambda item: item[0]))
    return sorted(((value, tuple(who)) for value, who in found.items()), key=lambda side: (-len(side[1]), side[1][0]))


def majority_of(sides: Collection[Collection[Item]]) -> Collection[Item]:
    """Return the side with more than half of all members, or nothing."""
    largest: Collection[Item] = max(sides, key=len, default=())
    return largest if 2 * len(largest) > sum(map(len, sides)) else ()


def outvoted(sides: Collection[Collection[int]]) -> tuple[int, ...]:
    """Return the ranks or files outside the majority, or all if there is none."""
    majority = set(majority_of(sides))
    return tuple(sorted(number for side in sides for number in side if number not in majority))
