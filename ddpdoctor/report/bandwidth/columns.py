"""Tables of numbers: right-aligned columns under their heads; a narrow terminal shows the weightiest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GAP = 2
"""Blanks between two columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its group's name over it, its own, its unit, and its cells."""

    group: str
    name: str
    unit: str
    cells: tuple[str, ...]
    weight: int
    """Of the columns that do not fit, those with the least weight go first."""

    @property
    def width(self) -> int:
        """The widest of what stands in it."""
        return max(map(len, (self.name, self.unit, *self.cells)))


def fit_columns(columns: Sequence[Column], width: int | None) -> tuple[Column, ...]:
    """Leave out the columns with the least weight until the others fit; ``width`` None leaves out none."""
    kept = list(columns)
    while width is not None and len(kept) > 1 and _total(kept) > width:
        kept.remove(min(reversed(kept), key=lambda column: column.weight))
    return tuple(kept)


def draw_columns(columns: Sequence[Column]) -> list[str]:
    """Draw the heads, then a line for each row of cells."""
    heads = [[column.name.rjust(column.width) for column in columns]]
    if any(column.unit for column in columns):
        heads.append([column.unit.rjust(column.width) for column in columns])
    rows = zip(*([cell.rjust(column.width) for cell in column.cells] for column in columns), strict=True)
    lines = [(" " * GAP).join(cells) for cells in (*heads, *rows)]
    groups = _draw_groups(columns)
    return [line.rstrip() for line in (*([groups] if groups.strip() else []), *lines)]


def _draw_groups(columns: Sequence[Column]) -> str:
    """Draw each group's name over its columns, lined out to their width: "-- latency ---"."""
    spans: list[tuple[str, int]] = []
    for column in columns:
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1] + GAP + column.width)
        else:
            spans.append((column.group, column.width))
    drawn = (f" {name} ".center(width, "-")[:width] if name else " " * width for name, width in spans)
    return (" " * GAP).join(drawn)


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)
