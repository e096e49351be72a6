"""Lists of ranks in words: "rank 4", "ranks 0-6, 9"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_SPAN = 3
"""Fewer numbers in a row are listed one by one: "0, 1" reads better than "0-1"."""


def format_numbers(numbers: Iterable[int]) -> str:
    """Sorted, without duplicates, runs drawn together: ``0-6, 9``."""
    parts: list[str] = []
    for first, last in _spans(sorted(set(numbers))):
        if last - first + 1 >= MIN_SPAN:
            parts.append(f"{first}-{last}")
        else:
            parts.extend(str(number) for number in range(first, last + 1))
    return ", ".join(parts)


def format_ranks(ranks: Iterable[int]) -> str:
    """``rank 4`` or ``ranks 0-6, 9``; empty for no rank."""
    known = sorted(set(ranks))
    if not known:
        return ""
    noun = "rank" if len(known) == 1 else "ranks"
    return f"{noun} {format_numbers(known)}"


def _spans(ordered: list[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for number in ordered:
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans
