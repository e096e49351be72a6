"""Lays out who waits for whom: layers from left to right, so that an arrow points at whom is waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.report.lines import clean
from ddpdoctor.report.names import format_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.report.blocks import WaitGraph, WaitNode

WIDTH, HEIGHT = 216, 66
"""Of a box, in pixels."""
ACROSS, DOWN, MARGIN = 64, 18, 10
"""Gaps between layers and between boxes, and around all."""
MAX_NODES = 40
"""A larger graph is unreadable. The list beside it has all."""
MAX_CHARACTERS = 31
"""What fits a line of a box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A node with its place in the picture and its lines of text."""

    x: int
    y: int
    lines: tuple[str, ...]
    blamed: bool
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An edge as the path of an SVG."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A graph that was laid out. ``words`` says each edge in a sentence. ``left_out`` counts nodes without a box."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    words: tuple[str, ...]
    left_out: int
    box_width: int = WIDTH
    box_height: int = HEIGHT


def lay_out_graph(graph: WaitGraph) -> Drawing:
    """Give each node a box and each edge an arrow. A circle has arrows that lead back, below the boxes."""
    count = min(len(graph.nodes), MAX_NODES)
    edges = [(one, other) for one, other in graph.edges if one < count and other < count and one != other]
    layers = _arrange(_find_layers(count, edges), edges)
    at_layer = {node: layer for layer, nodes in enumerate(layers) for node in nodes}
    top = MARGIN + (DOWN if any(at_layer[other] - at_layer[one] > 1 for one, other in edges) else 0)
    places = {
        node: (MARGIN + layer * (WIDTH + ACROSS), top + row * (HEIGHT + DOWN))
        for layer, nodes in enumerate(layers)
        for row, node in enumerate(nodes)
    }
    below = max((y for _, y in places.values()), default=0) + HEIGHT
    backward = [(one, other) for one, other in edges if places[other][0] <= places[one][0]]
    return Drawing(
        width=2 * MARGIN + len(layers) * (WIDTH + ACROSS) - ACROSS,
        height=below + MARGIN + (DOWN * 2 if backward else 0),
        boxes=tuple(_box(graph.nodes[node], places[node]) for node in sorted(places)),
        arrows=tuple(Arrow(path=_path(places[one], places[other], below)) for one, other in edges),
        words=tuple(_sentence(graph.nodes[one], graph.nodes[other]) for one, other in graph.edges),
        left_out=len(graph.nodes) - count,
    )


def _find_layers(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Put each node right of all that wait for it, as far as no circle forbids it."""
    order, forward = _walk(count, edges)
    layer = dict.fromkeys(range(count), 0)
    for node in order:
        for one, other in forward:
            if one == node:
                layer[other] = max(layer[other], layer[node] + 1)
    return [[node for node in layer if layer[node] == at] for at in range(max(layer.values(), default=-1) + 1)]


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


def _arrange(layers: list[list[int]], edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Order the nodes of each layer after the middle of those that wait for them, so that few arrows cross."""
    arranged: list[list[int]] = layers[:1]
    for nodes in layers[1:]:
        row = {node: at for at, node in enumerate(arranged[-1])}
        sources = {node: [row[one] for one, other in edges if other == node and one in row] for node in nodes}
        arranged.append(sorted(nodes, key=lambda node: sum(sources[node]) / max(len(sources[node]), 1)))
    return arranged


def _path(start: tuple[int, int], end: tuple[int, int], below: int) -> str:
    """Return a curve from the right of a box to the left of another.

    It passes above the boxes between them, and below all boxes if it leads back.
    """
    x, y = start[0] + WIDTH, start[1] + HEIGHT // 2
    to_x, to_y = end[0], end[1] + HEIGHT // 2
    if to_x > x + ACROSS:
        high = min(y, to_y) - HEIGHT
        return f"M{x} {y - DOWN}C{x + ACROSS} {high} {to_x - ACROSS} {high} {to_x} {to_y - DOWN}"
    if to_x > x:
        middle = (x + to_x) // 2
        return f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"
    from_x, into_x, low = start[0] + WIDTH // 2, end[0] + WIDTH // 2, below + DOWN * 2
    return f"M{from_x} {start[1] + HEIGHT}C{from_x} {low} {into_x} {low} {into_x} {end[1] + HEIGHT}"


def _box(node: WaitNode, place: tuple[int, int]) -> Box:
    lines = (format_ranks(node.ranks), node.state, node.place.rpartition("/")[2])
    return Box(
        x=place[0],
        y=place[1],
        lines=tuple(_cut(clean(line)) for line in lines if line),
        blamed=node.blamed,
        about=_words(node),
    )


def _sentence(one: WaitNode, other: WaitNode) -> str:
    return f"{_words(one)} {'waits' if len(one.ranks) == 1 else 'wait'} for {_words(other)}"


def _words(node: WaitNode) -> str:
    about = ", ".join(part for part in (node.state, node.place) if part)
    return f"{format_ranks(node.ranks)} ({about})" if about else format_ranks(node.ranks)


def _cut(line: str) -> str:
    return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
