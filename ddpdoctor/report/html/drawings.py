"""Drawings of a page, as SVG: charts, the graph of waits, the timeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.pictures import SpanKind
from ddpdoctor.model.words import format_size
from ddpdoctor.report.lines import clean, format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.pictures import Lane, Span, Timeline
    from ddpdoctor.report.blocks import ChartLine, Series, WaitGraph, WaitNode

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 34  # margins around the axes, in pixels
MAX_TICKS = 9
LEVEL_STYLE = 7  # The last of the colors of the page's style sheet, for levels. The others are for lines.


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
    # Each line has a color of its own. An earlier run has that of the line before it, a level the last one.
    styles: list[int] = []
    for line, is_reference in lines:
        before = max((style for style in styles if style != LEVEL_STYLE), default=-1)
        is_level = is_reference and len({y for _, y in line.points}) == 1
        styles.append(LEVEL_STYLE if is_level else before if is_reference else (before + 1) % LEVEL_STYLE)
    points = [point for line, _ in lines for point in _drawable(line)]
    if not points:
        return Chart(title=series.title, across=(), up=(), curves=())
    across = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT, room=1.0)
    up = _axis([y for _, y in points], HEIGHT - BOTTOM, TOP, room=1.25)
    first, last = math.ceil(math.log2(across.low) - 1e-9), math.floor(math.log2(across.high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / MAX_TICKS))
    return Chart(
        title=series.title,
        across=tuple(
            Tick(at=across.place(size), label=format_size(size))
            for size in [2**power for power in range(max(first, 0), last + 1, step)]
        ),
        up=tuple(Tick(at=up.place(value), label=f"{value:g}") for value in _value_ticks(up)),
        curves=tuple(
            _curve(line, across, up, style, is_reference=is_reference)
            for style, (line, is_reference) in zip(styles, lines, strict=True)
        ),
    )


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


def _value_ticks(axis: _Axis) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten within the axis, or the powers alone if those are enough."""
    decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        within = [tick for tick in ticks if axis.low <= tick <= axis.high]
        if len(within) <= MAX_TICKS:
            return within
    return within[:: math.ceil(len(within) / MAX_TICKS)]


BOX_WIDTH, BOX_HEIGHT = 216, 66  # of a box, in pixels
ACROSS, DOWN, MARGIN = 64, 18, 10  # gaps between layers and between boxes, and around all
MAX_NODES = 40  # A larger graph is unreadable. The list beside it has all.
MAX_CHARACTERS = 31  # what fits a line of a box


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A node with its place in the picture and its lines of text."""

    x: int
    y: int
    lines: tuple[str, ...]
    blamed: bool
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A graph that was laid out. ``words`` says each edge in a sentence. ``left_out`` counts nodes without a box."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    arrows: tuple[str, ...]  # each edge as the path of an SVG
    words: tuple[str, ...]
    left_out: int
    box_width: int = BOX_WIDTH
    box_height: int = BOX_HEIGHT


def lay_out_graph(graph: WaitGraph) -> Drawing:
    """Give each node a box and each edge an arrow. A circle has arrows that lead back, below the boxes."""
    count = min(len(graph.nodes), MAX_NODES)
    edges = [(one, other) for one, other in graph.edges if one < count and other < count and one != other]
    # Put each node right of all that wait for it, as far as no circle forbids it
    order, forward = _walk(count, edges)
    layer = dict.fromkeys(range(count), 0)
    for node in order:
        for one, other in forward:
            if one == node:
                layer[other] = max(layer[other], layer[node] + 1)
    # In each layer nodes stand after the middle of those that wait for them, so that few arrows cross
    layers: list[list[int]] = []
    for at in range(max(layer.values(), default=-1) + 1):
        row = {node: place for place, node in enumerate(layers[-1] if layers else ())}
        nodes = [node for node in layer if layer[node] == at]
        middle = {}
        for node in nodes:
            sources = [row[one] for one, other in edges if other == node and one in row]
            middle[node] = sum(sources) / max(len(sources), 1)
        layers.append(sorted(nodes, key=lambda node: middle[node]))
    at_layer = {node: layer for layer, nodes in enumerate(layers) for node in nodes}
    top = MARGIN + (DOWN if any(at_layer[other] - at_layer[one] > 1 for one, other in edges) else 0)
    places = {
        node: (MARGIN + layer * (BOX_WIDTH + ACROSS), top + row * (BOX_HEIGHT + DOWN))
        for layer, nodes in enumerate(layers)
        for row, node in enumerate(nodes)
    }
    sentences = []
    for one, other in graph.edges:
        verb = "waits" if len(graph.nodes[one].ranks) == 1 else "wait"
        sentences.append(f"{_words(graph.nodes[one])} {verb} for {_words(graph.nodes[other])}")
    below = max((y for _, y in places.values()), default=0) + BOX_HEIGHT
    backward = [(one, other) for one, other in edges if places[other][0] <= places[one][0]]
    return Drawing(
        width=2 * MARGIN + len(layers) * (BOX_WIDTH + ACROSS) - ACROSS,
        height=below + MARGIN + (DOWN * 2 if backward else 0),
        boxes=tuple(_box(graph.nodes[node], places[node]) for node in sorted(places)),
        arrows=tuple(_path(places[one], places[other], below) for one, other in edges),
        words=tuple(sentences),
        left_out=len(graph.nodes) - count,
    )


def _walk(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the nodes so that each comes before those it waits for, and the edges that do not close a circle."""
    order: list[int] = []
    forward: list[tuple[int, int]] = []
    open_nodes: set[int] = set()

    def visit(node: int) -> None:
        open_nodes.add(node)
        for edge in edges:
            if edge[0] == node and edge[1] not in open_nodes:
                forward.append(edge)
                if edge[1] not in order:
                    visit(edge[1])
        open_nodes.remove(node)
        order.insert(0, node)

    awaited = {other for _, other in edges}
    for node in sorted(range(count), key=lambda node: node in awaited):
        if node not in order:
            visit(node)
    return order, forward


def _path(start: tuple[int, int], end: tuple[int, int], below: int) -> str:
    """Return a curve from the right of a box to the left of another.

    It passes above the boxes between them, and below all boxes if it leads back.
    """
    x, y = start[0] + BOX_WIDTH, start[1] + BOX_HEIGHT // 2
    to_x, to_y = end[0], end[1] + BOX_HEIGHT // 2
    if to_x > x + ACROSS:
        high = min(y, to_y) - BOX_HEIGHT
        return f"M{x} {y - DOWN}C{x + ACROSS} {high} {to_x - ACROSS} {high} {to_x} {to_y - DOWN}"
    if to_x > x:
        middle = (x + to_x) // 2
        return f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"
    from_x, into_x, low = start[0] + BOX_WIDTH // 2, end[0] + BOX_WIDTH // 2, below + DOWN * 2
    return f"M{from_x} {start[1] + BOX_HEIGHT}C{from_x} {low} {into_x} {low} {into_x} {end[1] + BOX_HEIGHT}"


def _box(node: WaitNode, place: tuple[int, int]) -> Box:
    lines = (format_ranks(node.ranks), node.state, node.place.rpartition("/")[2])
    cleaned = [clean(line) for line in lines if line]
    cut = (
        line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
        for line in cleaned
    )
    return Box(x=place[0], y=place[1], lines=tuple(cut), blamed=node.blamed, about=_words(node))


def _words(node: WaitNode) -> str:
    about = ", ".join(part for part in (node.state, node.place) if part)
    return f"{format_ranks(node.ranks)} ({about})" if about else format_ranks(node.ranks)


TICKS_PER_MS = 100  # times are whole hundredths of a millisecond: 10 us is finer than a screen shows
ABSENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """A row of the table of a timeline: ranks that did the same, and the last thing that they did."""

    ranks: tuple[int, ...]
    state: str
    blamed: bool
    last: str


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline for the script. ``timeline_data.js`` reads it.

    ``whats`` holds what spans have in common: [kind, label, group, shape, place]. A lane's spans are one flat list,
    four numbers each: what, start after the start of the span before, duration (-1: not ended), number (-1: none).
    """
    whats: dict[tuple[Any, ...], int] = {}
    lanes = [
        {
            "rank": lane.rank,
            "host": lane.host,
            "state": lane.state,
            "blamed": lane.blamed,
            "coarse": _pack(lane.coarse, whats),
            "detail": _pack(lane.detail, whats),
        }
        for lane in timeline.lanes
    ]
    return {
        "kinds": [kind.value for kind in SpanKind],
        "startedAt": timeline.started_at,
        "lengthMs": timeline.length_ms,
        "detailFromMs": timeline.detail_from_ms,
        "lanes": lanes,
        "classes": _classes(timeline),
        "events": [
            {"atMs": one.at_ms, "label": one.label, "ranks": one.ranks, "fault": one.fault} for one in timeline.events
        ],
        "whats": list(whats),
    }


def lane_rows(timeline: Timeline) -> tuple[LaneRow, ...]:
    """Return a row for each class of ranks, those to blame first."""
    by_rank = {lane.rank: lane for lane in timeline.lanes}
    rows = []
    for ranks in _classes(timeline):
        lanes = [by_rank[rank] for rank in ranks]
        lane = next((one for one in lanes if one.detail), lanes[0])
        rows.append(
            LaneRow(
                ranks=tuple(ranks), state=lane.state, blamed=any(one.blamed for one in lanes), last=_describe_last(lane)
            )
        )
    return tuple(rows)


def _classes(timeline: Timeline) -> list[list[int]]:
    """Return the classes, those to blame first. A rank without a lane is left out, one without a class has its own."""
    blamed = {lane.rank: lane.blamed for lane in timeline.lanes}
    classes = [[rank for rank in ranks if rank in blamed] for ranks in timeline.classes]
    known = {rank for ranks in classes for rank in ranks}
    classes += [[rank] for rank in blamed if rank not in known]
    return sorted((ranks for ranks in classes if ranks), key=lambda ranks: not any(blamed[rank] for rank in ranks))


def _pack(spans: Iterable[Span], whats: dict[tuple[Any, ...], int]) -> list[int]:
    kinds = list(SpanKind)
    packed: list[int] = []
    before = 0
    for span in sorted(spans, key=lambda span: span.start_ms):
        key = (kinds.index(span.kind), span.label, span.group, span.shape, span.place)
        start = _ticks(span.start_ms)
        duration = ABSENT if span.end_ms is None else max(0, _ticks(span.end_ms) - start)
        number = ABSENT if span.number is None else span.number
        packed += [whats.setdefault(key, len(whats)), start - before, duration, number]
        before = start
    return packed


def _ticks(time_ms: float) -> int:
    return round(time_ms * TICKS_PER_MS) if math.isfinite(time_ms) else 0


def _describe_last(lane: Lane) -> str:
    """Describe the last call of a lane, else the last thing that it did."""
    spans = lane.detail or lane.coarse
    calls = [span for span in spans if span.kind in {SpanKind.COLLECTIVE, SpanKind.POINT_TO_POINT}] or spans
    if not calls:
        return ""
    last = max(calls, key=lambda span: span.start_ms)
    number = "" if last.number is None else f"number {last.number}"
    group = f"in {last.group}" if last.group else ""
    began = f"from {last.start_ms / 1e3:.2f} s"
    ended = "not ended" if last.end_ms is None else f"to {last.end_ms / 1e3:.2f} s"
    return ", ".join(part for part in (last.label, group, number, last.shape, last.place, f"{began}, {ended}") if part)
