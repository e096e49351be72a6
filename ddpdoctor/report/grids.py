"""Builds grids: members with equal cells share a column, large grids are cut, and the legend says what is left out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.words import count_of, grouped
from ddpdoctor.report.blocks import Grid, GridCell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Row = tuple[str, Mapping[int, GridCell]]
    """The name of a row, and its cells by member: by rank, or by the position of a host or file."""

MAX_ROWS = 60
MAX_COLUMNS = 64
"""Our choice: more is unreadable on a page. The report's data has the rest."""
MARK = "> "
"""The prefix of a row or column to look at, as in the tables of a terminal."""


def grid_by_member(
    title: str,
    rows: Sequence[Row],
    members: Iterable[int],
    name: Callable[[Sequence[int]], str],
    *,
    axes: tuple[str, str],
    legend: Iterable[str] = (),
) -> Grid:
    """Return a grid of rows by members, with at most ``MAX_COLUMNS`` columns. ``name`` names members with equal cells.

    A member without a cell in a row has an empty one. ``axes`` say what a row and a column is.
    """
    empty = GridCell()
    columns = ((tuple(cells.get(one, empty) for _, cells in rows), one) for one in members)
    folded = list(grouped(columns).items())
    shown = folded[:MAX_COLUMNS]
    more = sum(len(those) for _, those in folded[MAX_COLUMNS:])
    return Grid(
        title=title,
        rows=tuple(label for label, _ in rows),
        columns=tuple(name(those) for _, those in shown),
        cells=tuple(tuple(cells[at] for cells, _ in shown) for at in range(len(rows))),
        row_name=axes[0],
        column_name=axes[1],
        legend=(*legend, *not_shown(more, axes[1])),
    )


def not_shown(count: int, noun: str) -> tuple[str, ...]:
    """Return the line of a legend about what a grid leaves out, or nothing if it shows everything."""
    return (f"Not shown: {count_of(count, f'more {noun}')}.",) if count > 0 else ()


def linear_level(value: float, high: float) -> float | None:
    """Return the place of a value between 0 and ``high``, from 0 to 1. None if it has none."""
    if not (math.isfinite(value) and math.isfinite(high)) or high <= 0:
        return None
    return round(min(max(value / high, 0.0), 1.0), 3)


def log_level(value: float, low: float, high: float) -> float | None:
    """Return the place of a value between ``low`` and ``high`` by its logarithm, from 0 to 1. None if it has none."""
    if not all(math.isfinite(one) and one > 0 for one in (value, low, high)) or low >= high:
        return None
    return round(min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0), 3)
