"""Groups ranks that did the same at the end, and names the line that a rank is at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.sides import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.findings import Finding, Place, RankRow
    from ddpdoctor.model.stacks import Frame


def blamed_ranks(verdict: Finding | None) -> frozenset[int]:
    """Return the ranks that a verdict blames."""
    return frozenset(verdict.ranks) if verdict is not None else frozenset()


def classes_of(rows: Mapping[int, RankRow], blamed: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks in the same state at the same line, by lowest rank. Blamed ranks have their own classes."""
    alike = grouped(((row.state, place_words(row.where), rank in blamed), rank) for rank, row in sorted(rows.items()))
    return tuple(tuple(ranks) for ranks in alike.values())


def rows_by_rank(rows: Iterable[RankRow]) -> dict[int, RankRow]:
    """Return the row of each rank. If several processes have one number, the last counts."""
    return {row.rank: row for row in sorted(rows, key=lambda row: row.rank)}


def place_words(place: Place | None) -> str:
    """Write a line of code: "/home/me/train.py:61 in main"; empty if it is unknown."""
    return f"{place.file}:{place.line} in {place.function}" if place is not None else ""


def short_place(place: Place | Frame | None) -> str:
    """Write a line of code with the name of its file only: "train.py:61 in main"."""
    return f"{place.file.rpartition('/')[2]}:{place.line} in {place.function}" if place is not None else ""
