"""Words for lists of ranks, names and other things."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def rank_list(ranks: Iterable[int], noun: str = "rank") -> str:
    """Return "rank 3", "ranks 0 and 2" or "ranks 0-6, 9". ``noun`` replaces the word "rank"."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) == 2:
        return f"{noun}s {numbers[0]} and {numbers[1]}"
    return f"{noun}s {format_numbers(numbers)}"


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers sorted, each once: "0-6, 9". Two in a row stay "0, 1", because that reads better than "0-1"."""
    spans = _spans(sorted(set(numbers)))
    return ", ".join(f"{a}-{b}" if b > a + 1 else f"{a}, {b}" if b > a else str(a) for a, b in spans)


def count_of(number: int, noun: str, nouns: str = "") -> str:
    """Return "1 tensor" or "2 tensors". ``nouns`` is the plural if it is irregular."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def name_list(names: Sequence[str], most: int = 4) -> str:
    """Return "a", "a and b", or "a, b, c and 12 more" if there are more than ``most``."""
    if len(names) > most:
        return first_names(names, most - 1)
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def first_names(names: Sequence[str], most: int = 4, *, count: int | None = None) -> str:
    """Return "a, b, c, d and 5 more". ``count`` is how many there are if ``names`` are the first of them only."""
    more = (len(names) if count is None else count) - len(names[:most])
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans
