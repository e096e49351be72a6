"""Lays out a chart: lines over sizes, with both axes logarithmic, as coordinates of an SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.report.blocks import ChartLine, Series

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 34
"""Margins around the axes, in pixels."""
MAX_TICKS = 9
LEVEL_STYLE = 7
"""The last of the colors of the page's style sheet, for levels. The others are for lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point of a line. ``about`` is what hovering says."""

    x: float
    y: float
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLine:
    """A line. A reference has no marks."""

    name: str
    path: str
    marks: tuple[Mark, ...]
    style: int
    is_reference: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart that was laid out."""

    title: str
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    curves: tuple[PlacedLine, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        span = math.log(self.high / self.low) or 1.0
        return round(self.start + math.log(value / self.low) / span * (self.end - self.start), 1)


def lay_out_chart(series: Series) -> Chart:
    """Give each point its place. Points that are not above 0 are left out."""
    lines = [(line, line.is_reference) for line in series.lines]
    lines += [(series.reference, True)] if series.reference is not None else []
    points = [point for line, _ in lines for point in _drawable(line)]
    if not points:
        return Chart(title=series.title, across=(), up=(), curves=())
    across = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT, room=1.0)
    up = _axis([y for _, y in points], HEIGHT - BOTTOM, TOP, room=1.25)
    return Chart(
        title=series.title,
        across=tuple(Tick(at=across.place(size), label=format_size(size)) for size in _size_ticks(across)),
        up=tuple(Tick(at=up.place(value), label=f"{value:g}") for value in _value_ticks(up)),
        curves=tuple(
            _curve(line, across, up, style, is_reference=is_reference)
            for style, (line, is_reference) in zip(_styles(lines), lines, strict=True)
        ),
    )


def _styles(lines: Sequence[tuple[ChartLine, bool]]) -> list[int]:
    """Give each line a color of its own. An earlier run has that of the line before it, a level the last one."""
    styles: list[int] = []
    for line, is_reference in lines:
        before = max((style for style in styles if style != LEVEL_STYLE), default=-1)
        is_level = is_reference and len({y for _, y in line.points}) == 1
        styles.append(LEVEL_STYLE if is_level else before if is_reference else (before + 1) % LEVEL_STYLE)
    return styles


def _drawable(line: ChartLine) -> list[tuple[int, float]]:
    return [(x, y) for x, y in line.points if x > 0 and y > 0 and math.isfinite(y)]


def _axis(values: Sequence[float], start: float, end: float, room: float) -> _Axis:
    low, high = min(values) / room, max(values) * room
    return _Axis(low=low, high=high, start=start, end=end) if high > low else _Axis(
        low=low / 2, high=high * 2, start=start, end=end
    )  # fmt: skip


def _curve(line: ChartLine, across: _Axis, up: _Axis, style: int, *, is_reference: bool) -> PlacedLine:
    points = _drawable(line)
    marks = tuple(
        Mark(x=across.place(x), y=up.place(y), about=f"{line.name}: {y:.4g} at {format_size(x)}") for x, y in points
    )
    return PlacedLine(
        name=line.name,
        path="M" + "L".join(f"{mark.x} {mark.y}" for mark in marks) if marks else "",
        marks=() if is_reference else marks,
        style=style,
        is_reference=is_reference,
    )


def _size_ticks(axis: _Axis) -> list[int]:
    """Return powers of two, few enough to have room for their names."""
    first, last = math.ceil(math.log2(axis.low) - 1e-9), math.floor(math.log2(axis.high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / MAX_TICKS))
    return [2**power for power in range(max(first, 0), last + 1, step)]


def _value_ticks(axis: _Axis) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten within the axis, or the powers alone if those are enough."""
    decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        within = [tick for tick in ticks if axis.low <= tick <= axis.high]
        if len(within) <= MAX_TICKS:
            return within
    return within[:: math.ceil(len(within) / MAX_TICKS)]
