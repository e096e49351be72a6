"""Who waits for whom, link by link: ranks and pending collectives are nodes, and this finds the circles among them."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .groups import Group, Position, reached
from .states import Doing, State
from .waits import groups_made, met_peers, unanswered_peers

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    Edges = Mapping[Hashable, tuple[Hashable, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A rank that waits directly for another."""

    waiter: int
    awaited: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """Ranks that each, in the end, wait for themselves."""

    ranks: tuple[int, ...]
    links: tuple[Link, ...]
    """A shortest path from the first rank around and back to it."""


def find_circles(
    states: Mapping[int, State], positions: Mapping[int, Position], *, detail: bool
) -> tuple[Circle, ...]:  # fmt: skip
    """Return all circles. Each rank points to the collective it waits in, each collective to the ranks it lacks."""
    edges = _edges(states, positions, detail=detail)
    found = []
    for component in _components(edges):
        ranks = sorted(node for node in component if isinstance(node, int))
        if len(ranks) > 1:
            found.append(Circle(ranks=tuple(ranks), links=_way_around(ranks[0], component, edges)))
    return tuple(sorted(found, key=lambda circle: circle.ranks))


def find_met_pairs(states: Mapping[int, State]) -> tuple[Circle, ...]:
    """Return the pairs of ranks of which one sends what the other waits to receive, as circles of two."""
    peers = met_peers(states)
    return tuple(
        Circle(ranks=(one, other), links=(Link(waiter=one, awaited=other), Link(waiter=other, awaited=one)))
        for one, other in sorted(peers.items())
        if one < other
    )


def _edges(states: Mapping[int, State], positions: Mapping[int, Position], *, detail: bool) -> Edges:
    edges: dict[Hashable, tuple[Hashable, ...]] = {n: (position,) for n, position in positions.items()}
    edges |= _lacking(states, positions, detail=detail)
    edges |= {number: (peer,) for number, peer in unanswered_peers(states).items()}
    edges |= _lacking_in_new_group(states)
    return edges


def _lacking(
    states: Mapping[int, State], positions: Mapping[int, Position], *, detail: bool
) -> dict[Hashable, tuple[Hashable, ...]]:  # fmt: skip
    """Return whom each pending collective lacks: members below its number, and everyone that an earlier one lacks.

    This way each member is checked once per group, however many numbers are waited for.
    """
    by_group: dict[Group, set[int | None]] = defaultdict(set)
    for position in positions.values():
        by_group[position.group].add(position.seq)
    edges: dict[Hashable, tuple[Hashable, ...]] = {}
    for group, numbers in by_group.items():
        here = {n for n in group.members if n in states}
        come = {n: reached(states[n], group.name, detail=detail) for n in here}
        before: tuple[Hashable, ...] = ()
        left = {n for n, number in come.items() if number is not None}
        for seq in sorted(number for number in numbers if number is not None):
            late = {n for n in left if (come[n] or 0) < seq}
            left -= late
            edges[Position(group=group, seq=seq)] = (*before, *sorted(late))
            before = (Position(group=group, seq=seq),)
        if None in numbers:
            edges[Position(group=group, seq=None)] = tuple(n for n in sorted(here) if not _is_in(n, group, positions))
    return edges


def _is_in(number: int, group: Group, positions: Mapping[int, Position]) -> bool:
    position = positions.get(number)
    return position is not None and position.group == group


def _lacking_in_new_group(states: Mapping[int, State]) -> dict[Hashable, tuple[Hashable, ...]]:
    """Make each rank in ``new_group`` wait for the ranks that have called it less often."""
    inside = [n for n, state in states.items() if state.doing is Doing.NEW_GROUP]
    if not inside:
        return {}
    made = {n: groups_made(state.rank) for n, state in states.items()}
    most = max(made[n] for n in inside)
    node = ("new_group", most)
    lacking = tuple(n for n in sorted(made) if made[n] < most)
    return {node: lacking, **{n: (node,) for n in inside if made[n] == most}}


def _components(edges: Edges) -> list[set[Hashable]]:
    """Return the strongly connected components, by Tarjan's algorithm without recursion: linear in nodes and edges."""
    order: dict[Hashable, int] = {}
    low: dict[Hashable, int] = {}
    stack: list[Hashable] = []
    waiting: set[Hashable] = set()
    found: list[set[Hashable]] = []
    for root in edges:
        if root in order:
            continue
        work = [(root, iter(edges.get(root, ())))]
        order[root] = low[root] = len(order)
        stack.append(root)
        waiting.add(root)
        while work:
            node, rest = work[-1]
            step = next(rest, None)
            if step is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    found.append(_popped(stack, waiting, node))
            elif step not in order:
                order[step] = low[step] = len(order)
                stack.append(step)
                waiting.add(step)
                work.append((step, iter(edges.get(step, ()))))
            elif step in waiting:
                low[node] = min(low[node], order[step])
    return found


def _popped(stack: list[Hashable], waiting: set[Hashable], root: Hashable) -> set[Hashable]:
    component = set()
    while root not in component:
        node = stack.pop()
        waiting.discard(node)
        component.add(node)
    return component


def _way_around(start: int, component: set[Hashable], edges: Edges) -> tuple[Link, ...]:
    """Return a shortest path from a rank of a circle back to itself, as links between ranks."""
    came_from: dict[Hashable, Hashable] = {}
    queue: deque[Hashable] = deque([start])
    while queue and start not in came_from:
        node = queue.popleft()
        for step in edges.get(node, ()):
            if step in component and step not in came_from:
                came_from[step] = node
                queue.append(step)
    path: list[Hashable] = [start]
    while len(path) == 1 or path[-1] != start:
        path.append(came_from[path[-1]])
    ranks = [node for node in reversed(path) if isinstance(node, int)]
    return tuple(Link(waiter=a, awaited=b) for a, b in pairwise(ranks))
