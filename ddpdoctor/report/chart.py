"""A small chart for a terminal: lines over sizes in bytes, with logarithmic axes and one mark per line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.report.blocks import ChartLine, Series

ROWS = 9
MAX_COLUMNS = 72
"""In a wider chart, a curve of twenty sizes only gets flatter."""
MIN_COLUMNS = 20
"""A narrower chart is unreadable."""
MARKS = "ox+*#%@"
REFERENCE = "-"
LABEL_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    low: float
    high: float
    steps: int

    def place(self, value: float) -> int:
        """Return the step of a value, from 0 to ``steps`` - 1."""
        span = math.log(self.high / self.low) or 1.0
        return round(math.log(value / self.low) / span * (self.steps - 1))

    def value(self, step: int) -> float:
        return self.low * math.pow(self.high / self.low, step / max(self.steps - 1, 1))


def draw_chart(series: Series, width: int) -> list[str]:
    """Draw the lines, or return nothing if there are too few points or there is too little room."""
    columns = min(width - LABEL_WIDTH - 3, MAX_COLUMNS)
    known = [line for line in series.lines if len(line.points) > 1]
    drawn, reference = known[: len(MARKS)], series.reference
    if not drawn or columns < MIN_COLUMNS:
        return []
    points = [point for line in (*drawn, *([reference] if reference else ())) for point in line.points]
    across = _Scale(low=min(x for x, _ in points), high=max(x for x, _ in points), steps=columns)
    up = _Scale(low=min(y for _, y in points), high=max(y for _, y in points), steps=ROWS)
    grid = [[" "] * columns for _ in range(ROWS)]
    if reference:
        _draw_reference(grid, reference, across, up)
    for mark, line in zip(MARKS, drawn, strict=False):
        for x, y in line.points:
            grid[up.place(y)][across.place(x)] = mark
    title = series.title + ("" if known == drawn else f", the first {len(drawn)} of {len(known)} series")
    return [title, *_legend(drawn, reference), *_frame(grid, up), _bottom(across)]


def _draw_reference(grid: list[list[str]], reference: ChartLine, across: _Scale, up: _Scale) -> None:
    (first, height), (last, _) = reference.points[0], reference.points[-1]
    for column in range(across.place(first), across.place(last) + 1):
        grid[up.place(height)][column] = REFERENCE


def _legend(lines: Sequence[ChartLine], reference: ChartLine | None) -> list[str]:
    names = [f"{mark} {line.name}" for mark, line in zip(MARKS, lines, strict=False)]
    return [*names, *([f"{REFERENCE} {reference.name}"] if reference else [])]


def _frame(grid: list[list[str]], up: _Scale) -> list[str]:
    labeled = {0, ROWS // 2, ROWS - 1}
    labels = [f"{up.value(row):.3g}" if row in labeled else "" for row in range(ROWS)]
    return [f"{labels[row].rjust(LABEL_WIDTH)} |{''.join(grid[row])}".rstrip() for row in reversed(range(ROWS))]


def _bottom(across: _Scale) -> str:
    first, last = format_size(int(across.low)), format_size(int(across.high))
    return " " * (LABEL_WIDTH + 2) + first + last.rjust(across.steps - len(first))
