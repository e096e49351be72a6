"""Draws tables as plain text, with headers, units and groups. A narrow terminal drops columns of low weight."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.report.text.page import width_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.report.blocks import Column, Table
    from ddpdoctor.report.text.page import TextPage

GAP = 2
"""Number of blanks between two columns."""


def draw_table(table: Table, page: TextPage) -> list[str] | None:
    """Return the lines of a table, headers first, or None if it is too wide and has a replacement."""
    space = None if page.width is None else page.width - table.indent
    cleaned = [
        replace(one, cells=tuple(map(page.clean, one.cells)), name=page.clean(one.name)) for one in table.columns
    ]
    columns = fit_columns(cleaned, space)
    if table.instead and space is not None and _total(columns) > space:
        return None
    return [(" " * table.indent + line).rstrip() for line in draw_columns(columns)]


def fit_columns(columns: Sequence[Column], width: int | None) -> tuple[Column, ...]:
    """Drop columns with a weight, the least first, until the others fit. If ``width`` is None, keep all."""
    kept = list(columns)
    while width is not None and len(kept) > 1 and _total(kept) > width:
        weighted = [(one.weight, -at) for at, one in enumerate(kept) if one.weight is not None]
        if not weighted:
            break
        del kept[-min(weighted)[1]]
    return tuple(kept)


def draw_columns(columns: Sequence[Column]) -> list[str]:
    """Draw the headers, if there are any, and a line for each row of cells."""
    heads = [line for line in ([one.name for one in columns], [one.unit for one in columns]) if any(line)]
    rows = zip(*(one.cells for one in columns), strict=True)
    groups = _draw_groups(columns)
    drawn = [_draw_row(columns, cells) for cells in (*heads, *rows)]
    return [groups, *drawn] if groups else drawn


def _draw_row(columns: Sequence[Column], cells: Sequence[str]) -> str:
    padded = []
    for one, cell in zip(columns, cells, strict=True):
        padding = " " * (_width(one) - width_of(cell))
        padded.append(cell + padding if one.align == "left" else padding + cell)
    return (" " * GAP).join(padded).rstrip()


def _draw_groups(columns: Sequence[Column]) -> str:
    """Draw each group's name above its columns, padded with dashes: "-- latency ---"."""
    spans: list[tuple[str, int]] = []
    for column in columns:
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1] + GAP + _width(column))
        else:
            spans.append((column.group, _width(column)))
    drawn = (f" {name} ".center(width, "-")[:width] if name else " " * width for name, width in spans)
    return (" " * GAP).join(drawn).rstrip()


def _width(column: Column) -> int:
    return max(map(width_of, (column.name, column.unit, *column.cells)))


def _total(columns: Sequence[Column]) -> int:
    return sum(map(_width, columns)) + GAP * (len(columns) - 1)
