"""Finds the variable that a misspelled name was meant to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_EDITS = 2
"""Our choice: most letters added, left out or changed; two swapped letters count as two."""
SHORTEST_STEM = 8
"""Our choice: a shorter name, such as NCCL_IB, is the beginning of too many names to mean one of them."""


def find_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelled name was meant to be, or None.

    It is the nearest name within two edits, ignoring case. If there is none, it is a name that begins with this one, or
    that this one begins with.
    """
    names = sorted(known)
    near = [(_distance(name, other), other) for other in names if abs(len(name) - len(other)) <= MOST_EDITS]
    near += [(_distance(name.upper(), other), other) for other in names if name.upper() != name]
    edits, best = min(near, default=(MOST_EDITS + 1, ""))
    return best if edits <= MOST_EDITS else _by_stem(name.upper(), names)


def _by_stem(name: str, names: list[str]) -> str | None:
    """Return the longest known beginning of a name, or the shortest known name that begins with it."""
    shorter = [other for other in names if name.startswith(other)]
    longer = [other for other in names if other.startswith(name) and len(name) >= SHORTEST_STEM]
    if shorter:
        return max(shorter, key=len)
    return min(longer, key=len, default=None)


def _distance(one: str, other: str) -> int:
    """Return the edit distance (Levenshtein); if it is above the limit, return any number above the limit."""
    if abs(len(one) - len(other)) > MOST_EDITS:
        return MOST_EDITS + 1
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
        if min(row) > MOST_EDITS:
            return MOST_EDITS + 1
    return row[-1]
