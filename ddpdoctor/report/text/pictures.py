"""Pictures in text: the timeline as a strip, and curves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.pictures import SpanKind
from ddpdoctor.model.words import format_size, format_time
from ddpdoctor.report.lines import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.pictures import Lane, Span, Timeline
    from ddpdoctor.report.blocks import Series

MARKS = {
    SpanKind.BATCH: "d",
    SpanKind.FORWARD: "F",
    SpanKind.BACKWARD: "B",
    SpanKind.COLLECTIVE: "c",
    SpanKind.POINT_TO_POINT: "p",
    SpanKind.CHECKPOINT: "k",
    SpanKind.WAIT: "w",
    SpanKind.HOST: ".",
}
WORDS = {
    SpanKind.BATCH: "data",
    SpanKind.FORWARD: "forward",
    SpanKind.BACKWARD: "backward",
    SpanKind.COLLECTIVE: "collective",
    SpanKind.POINT_TO_POINT: "send/recv",
    SpanKind.CHECKPOINT: "checkpoint",
    SpanKind.WAIT: "wait",
    SpanKind.HOST: "script",
}
MOST_ROWS = 8
STRIP_WIDTH = 78  # our choice: a strip fits into 80 columns also where the width is not known
NAME_WIDTH = 22  # a longer list of ranks is cut
CALLS_BEFORE = 24  # our choice: the strip begins so many calls before the fault, which is a few steps
SHARE_AFTER = 0.25  # our choice: this part of the strip is after the fault, if the job lived as long


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The time that a strip shows, and its columns."""

    start_ms: float
    end_ms: float
    columns: int

    @property
    def slice_ms(self) -> float:
        return (self.end_ms - self.start_ms) / self.columns

    def column(self, at_ms: float) -> int:
        return min(self.columns - 1, max(0, math.floor((at_ms - self.start_ms) / self.slice_ms)))


def draw_strip(timeline: Timeline, width: int) -> list[str]:
    """Return the lines of a strip in ASCII, the last one its legend; nothing without a fault or calls around it."""
    fault = next((event for event in timeline.events if event.fault), None)
    lanes = {lane.rank: lane for lane in timeline.lanes}
    rows = [
        (ranks, lane)
        for ranks in timeline.classes
        if (lane := next((lanes[rank] for rank in ranks if rank in lanes and lanes[rank].detail), None)) is not None
    ]
    rows.sort(key=lambda row: not row[1].blamed)
    shown = rows[:MOST_ROWS]
    names = [_name(ranks) for ranks, _ in shown]
    name_width = max(map(len, names), default=0)
    columns = width - name_width - 4
    if fault is None:
        return []
    # From a few calls before the fault to a little after it
    before = max((_back(lane, fault.at_ms) for _, lane in shown), default=0.0)
    after = min(timeline.length_ms - fault.at_ms, before * SHARE_AFTER / (1 - SHARE_AFTER))
    if not (math.isfinite(before + after) and before > 0 and after >= 0) or columns < 2:
        return []
    window = _Window(start_ms=fault.at_ms - before, end_ms=fault.at_ms + max(after, before / columns), columns=columns)
    drawn = [_draw(lane, window) for _, lane in shown]
    # The line above the rows, whose mark stands at the time of the fault
    at = name_width + 4 + window.column(fault.at_ms)
    label = fault.label + (f", {format_ranks(fault.ranks)}" if fault.ranks else "")
    left = f"{label} v"
    lines = [left.rjust(at + 1) if at + 1 >= len(left) else " " * at + f"v {label}"]
    for name, (_, lane), marks in zip(names, shown, drawn, strict=True):
        lines.append(f"{'> ' if lane.blamed else '  '}{name.ljust(name_width)}  {marks}".rstrip())
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more rows in report.json")
    marks = "".join(drawn)
    used = [f"{mark} {WORDS[kind]}" for kind, mark in MARKS.items() if mark in marks]
    return [*lines, f"{', '.join(used)}; each {format_time(window.slice_ms * 1e3)}"]


def _name(ranks: Sequence[int]) -> str:
    name = format_ranks(ranks)
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def _back(lane: Lane, fault_ms: float) -> float:
    """Return how long before the fault the first of the last calls of a lane began."""
    starts = [span.start_ms for span in lane.detail if span.kind is not SpanKind.HOST and span.start_ms < fault_ms]
    return fault_ms - starts[-CALLS_BEFORE:][0] if starts else 0.0


def _draw(lane: Lane, window: _Window) -> str:
    """Return a character for each slice: what the rank did for most of it. The inner one of nested spans counts."""
    kinds: list[dict[SpanKind, float]] = [{} for _ in range(window.columns)]
    for span, start_ms, end_ms in _innermost(lane.detail, window):
        for column in range(window.column(start_ms), window.column(end_ms) + 1):
            from_ms = window.start_ms + column * window.slice_ms
            part_ms = min(end_ms, from_ms + window.slice_ms) - max(start_ms, from_ms)
            if part_ms > 0:
                kinds[column][span.kind] = kinds[column].get(span.kind, 0.0) + part_ms
    return "".join(MARKS.get(max(found, key=lambda kind: found[kind]), " ") if found else " " for found in kinds)


def _innermost(spans: Sequence[Span], window: _Window) -> Iterator[tuple[Span, float, float]]:
    """Yield the parts of spans in the window that no later span covers."""
    free = [(window.start_ms, window.end_ms)]
    for span in reversed(spans):
        end_ms = window.end_ms if span.end_ms is None else span.end_ms
        left: list[tuple[float, float]] = []
        for start, end in free:
            inside = max(start, span.start_ms), min(end, end_ms)
            if inside[0] >= inside[1]:
                left.append((start, end))
                continue
            yield span, *inside
            left += [part for part in ((start, inside[0]), (inside[1], end)) if part[0] < part[1]]
        free = left


ROWS = 9
MAX_COLUMNS = 72  # in a wider chart, a curve of twenty sizes only gets flatter
MIN_COLUMNS = 20  # a narrower chart is unreadable
CURVE_MARKS = "ox+*#%@"
REFERENCE = "-"
LABEL_WIDTH = 8
# The characters of a curve on one line, the lowest first.
LEVELS = "_.:-=+*#"
MAX_SPARKS = 20  # our choice: the table has all numbers


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
    drawn, reference = known[: len(CURVE_MARKS)], series.reference
    if not drawn or columns < MIN_COLUMNS:
        return []
    points = [point for line in (*drawn, *([reference] if reference else ())) for point in line.points]
    across = _Scale(low=min(x for x, _ in points), high=max(x for x, _ in points), steps=columns)
    up = _Scale(low=min(y for _, y in points), high=max(y for _, y in points), steps=ROWS)
    grid = [[" "] * columns for _ in range(ROWS)]
    if reference:
        (first, height), (last, _) = reference.points[0], reference.points[-1]
        for column in range(across.place(first), across.place(last) + 1):
            grid[up.place(height)][column] = REFERENCE
    for mark, line in zip(CURVE_MARKS, drawn, strict=False):
        for x, y in line.points:
            grid[up.place(y)][across.place(x)] = mark
    title = series.title + ("" if known == drawn else f", the first {len(drawn)} of {len(known)} series")
    legend = [f"{mark} {line.name}" for mark, line in zip(CURVE_MARKS, drawn, strict=False)]
    legend += [f"{REFERENCE} {reference.name}"] if reference else []
    left, right = format_size(int(across.low)), format_size(int(across.high))
    return [title, *legend, *_frame(grid, up), " " * (LABEL_WIDTH + 2) + left + right.rjust(across.steps - len(left))]


def draw_sparks(series: Series) -> list[str]:
    """Draw each line in one line of characters, for where a chart has no room or nobody scrolls back to it."""
    known = [line for line in series.lines if len(line.points) > 1 and not line.is_reference]
    if not known:
        return []
    sizes = [x for line in known for x, _ in line.points]
    width = max(len(line.name) for line in known[:MAX_SPARKS])
    lines = []
    for line in known[:MAX_SPARKS]:  # a character for each point, and the lowest and the highest value
        values = [y for _, y in line.points]
        scale = _Scale(low=min(values), high=max(values), steps=len(LEVELS))
        curve = "".join(LEVELS[scale.place(y)] for y in values)
        lines.append(f"{line.name.ljust(width)}  {curve}  {scale.low:.3g} to {scale.high:.3g}")
    more = [f"and {len(known) - MAX_SPARKS} more"] if len(known) > MAX_SPARKS else []
    return [f"{series.title}, {format_size(min(sizes))} to {format_size(max(sizes))}", *lines, *more]


def _frame(grid: list[list[str]], up: _Scale) -> list[str]:
    labeled = {0, ROWS // 2, ROWS - 1}
    labels = [f"{up.value(row):.3g}" if row in labeled else "" for row in range(ROWS)]
    return [f"{labels[row].rjust(LABEL_WIDTH)} |{''.join(grid[row])}".rstrip() for row in reversed(range(ROWS))]
