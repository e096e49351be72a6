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
LEVELS = "_.:-=+*#"
"""The characters of a curve on one line, the lowest first."""
MAX_SPARKS = 20
"""Our choice: the table has all numbers."""


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
    known = [line for line in series.lines if len(line.points) > 1 and not line.is_reference]
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


def draw_sparks(series: Series) -> list[str]:
    """Draw each line in one line of characters, for where a chart has no room or nobody scrolls back to it."""
    known = [line for line in series.lines if len(line.points) > 1 and not line.is_reference]
    if not known:
        return []
    sizes = [x for line in known for x, _ in line.points]
    width = max(len(line.name) for line in known[:MAX_SPARKS])
    lines = [f"{line.name.ljust(width)}  {_spark(line)}" for line in known[:MAX_SPARKS]]
    more = [f"and {len(known) - MAX_SPARKS} more"] if len(known) > MAX_SPARKS else []
    return [f"{series.title}, {format_size(min(sizes))} to {format_size(max(sizes))}", *lines, *more]


def _spark(line: ChartLine) -> str:
    """Return a character for each point, and the lowest and the highest value. The scale is logarithmic."""
    values = [y for _, y in line.points]
    scale = _Scale(low=min(values), high=max(values), steps=len(LEVELS))
    return f"{''.join(LEVELS[scale.place(y)] for y in values)}  {scale.low:.3g} to {scale.high:.3g}"


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
