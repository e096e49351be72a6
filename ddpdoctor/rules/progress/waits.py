"""Who waits for whom: ranks and pending collectives are nodes, so the cost grows with the ranks, not their pairs."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.words import grouped

from ddpdoctor.rules.progress.groups import CallPosition, Group, peer_calls, reached
from ddpdoctor.rules.progress.states import NATIVE_PHASES, Activity, RankState

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from ddpdoctor.model.facts import Rank

    Edges = Mapping[Hashable, tuple[Hashable, ...]]


_SENDS = frozenset({"send", "isend"})
_RECEIVES = frozenset({"recv", "irecv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The result of following all waits of a job."""

    waiters: tuple[int, ...]
    """Ranks that can go on only if others do their part."""
    blockers: tuple[int, ...]
    """Ranks that others wait for, but that wait for nobody: the roots."""
    absent: tuple[int, ...]
    """Ranks that others wait for, but that have no process."""


def find_waits(
    states: Mapping[int, RankState], positions: Mapping[int, CallPosition], world: int
) -> Waits:  # fmt: skip
    """Follow the waits of all ranks to the ranks that wait for nobody."""
    waiters = tuple(sorted(number for number, state in states.items() if state.waiting))
    needed = _needed_in_groups(states, positions)
    needed |= needed_in_init(states, world)
    needed |= _needed_in_new_group(states)
    needed |= set(unanswered_peers(states).values())
    absent = {n for n in needed if n not in states or states[n].doing is Activity.MISSING}
    blockers = {n for n in needed - absent if not states[n].waiting}
    if not blockers and not absent:
        blockers = _behind(states, positions)
    return Waits(
        waiters=waiters,
        blockers=tuple(sorted(blockers)),
        absent=tuple(sorted(absent)),
    )


def furthest(positions: Mapping[int, CallPosition]) -> dict[Group, int | None]:
    """Return, for each group with waiters, the last number waited for, or None if no number is known."""
    found: dict[Group, int | None] = {}
    for position in positions.values():
        known = found.get(position.group)
        if position.seq is not None:
            found[position.group] = max(known or 0, position.seq)
        else:
            found.setdefault(position.group, None)
    return found


def _needed_in_groups(states: Mapping[int, RankState], positions: Mapping[int, CallPosition]) -> set[int]:
    """Return the members that have not arrived and are in no collective themselves."""
    needed = set()
    for group, seq in furthest(positions).items():
        for member in group.members:
            state = states.get(member)
            if state is None or not (state.waiting or _has_arrived(state, group.name, seq)):
                needed.add(member)
    return needed


def _has_arrived(state: RankState, name: str, seq: int | None) -> bool:
    if seq is None:
        return False
    come = reached(state, name)
    return come is None or come >= seq


def needed_in_init(states: Mapping[int, RankState], world: int) -> set[int]:
    """Return the ranks of the world that are neither in ``init_process_group`` nor past it."""
    if not any(state.doing is Activity.INIT for state in states.values()):
        return set()
    here = {n for n, state in states.items() if state.doing is Activity.INIT or state.rank.initialized}
    return set(range(world)) - here


def _needed_in_new_group(states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks that have called ``new_group`` less often than a rank that waits in it."""
    made = {n: groups_made(state.rank) for n, state in states.items()}
    most = max((made[n] for n, state in states.items() if state.doing is Activity.NEW_GROUP), default=0)
    return {n for n, state in states.items() if not state.waiting and made[n] < most}


def groups_made(rank: Rank) -> int:
    """Return how often a rank has called ``new_group``."""
    ended = sum(count for kind, count in pack_calls(rank.recent_calls).counts.items() if kind.op == "new_group")
    return ended + sum(call.op == "new_group" for call in rank.open_calls)


def unanswered_peers(states: Mapping[int, RankState]) -> dict[int, int]:
    """Return the ranks in a point-to-point call whose other half is not pending, each with its peer."""
    pending = peer_calls(states.values())
    found: dict[int, int] = {}
    for number, state in states.items():
        call = state.call
        if state.doing is not Activity.PEER or call is None or call.peer is None or call.peer == number:
            continue
        other_half = _RECEIVES if call.op in _SENDS else _SENDS
        if not pending.get((call.peer, number), frozenset()) & other_half:
            found[number] = call.peer
    return found


def met_peers(states: Mapping[int, RankState]) -> dict[int, int]:
    """Return the ranks that wait for a peer that waits in the other half of the same transfer, each with its peer."""
    calls = {n: state.call for n, state in states.items() if state.doing is Activity.PEER and state.call is not None}
    pending = peer_calls(states.values())  # all parts of a batch are pending
    found: dict[int, int] = {}
    for number, call in calls.items():
        other_half = _RECEIVES if call.op in _SENDS else _SENDS
        if call.peer not in calls or calls[call.peer].peer != number:
            continue
        if pending.get((call.peer, number), frozenset()) & other_half:
            found[number] = call.peer
    return found


def _behind(states: Mapping[int, RankState], positions: Mapping[int, CallPosition]) -> set[int]:
    """Return the ranks in a backward that has not begun the collective the others wait in: they still compute.

    This works only without DETAIL, when the counter shows which ranks already wait for the reducer.
    """
    last = furthest(positions)
    found = set()
    for number, position in positions.items():
        state, target = states[number], last[position.group]
        native = state.call is not None and state.call.op in NATIVE_PHASES and not state.detail
        if native and position.seq is not None and target is not None and position.seq < target:
            found.add(number)
    return found


def by_position(positions: Mapping[int, CallPosition]) -> dict[CallPosition, list[int]]:
    """Return the ranks that wait in each pending collective."""
    return grouped((position, number) for number, position in sorted(positions.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCircle:
    """Ranks that each, in the end, wait for themselves."""

    ranks: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    """A shortest path from the first rank around and back to it: pairs of a rank and the rank that it waits for."""


def find_circles(
    states: Mapping[int, RankState], positions: Mapping[int, CallPosition]
) -> tuple[WaitCircle, ...]:  # fmt: skip
    """Return all circles. Each rank points to the collective it waits in, each collective to the ranks it lacks."""
    edges = wait_edges(states, positions)
    found = []
    for component in _components(edges):
        ranks = sorted(node for node in component if isinstance(node, int))
        if len(ranks) > 1:
            found.append(WaitCircle(ranks=tuple(ranks), links=_way_around(ranks[0], component, edges)))
    return tuple(sorted(found, key=lambda circle: circle.ranks))


def find_met_pairs(states: Mapping[int, RankState]) -> tuple[WaitCircle, ...]:
    """Return the pairs of ranks of which one sends what the other waits to receive, as circles of two."""
    peers = met_peers(states)
    return tuple(
        WaitCircle(ranks=(one, other), links=((one, other), (other, one)))
        for one, other in sorted(peers.items())
        if one < other
    )


def wait_edges(states: Mapping[int, RankState], positions: Mapping[int, CallPosition]) -> Edges:
    """Return the links from each waiting rank to its pending call, and from each call to whom it lacks.

    A call may also lead to an earlier call of its group, which then comes before it in the mapping.
    """
    edges: dict[Hashable, tuple[Hashable, ...]] = {n: (position,) for n, position in positions.items()}
    edges |= _lacking(states, positions)
    edges |= {number: (peer,) for number, peer in unanswered_peers(states).items()}
    edges |= _lacking_in_new_group(states)
    return edges


def _lacking(
    states: Mapping[int, RankState], positions: Mapping[int, CallPosition]
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
        come = {n: reached(states[n], group.name) for n in here}
        before: tuple[Hashable, ...] = ()
        left = {n for n, number in come.items() if number is not None}
        for seq in sorted(number for number in numbers if number is not None):
            late = {n for n in left if (come[n] or 0) < seq}
            left -= late
            edges[CallPosition(group=group, seq=seq)] = (*before, *sorted(late))
            before = (CallPosition(group=group, seq=seq),)
        if None in numbers:
            edges[CallPosition(group=group, seq=None)] = tuple(
                n for n in sorted(here) if not _is_in(n, group, positions)
            )
    return edges


def _is_in(number: int, group: Group, positions: Mapping[int, CallPosition]) -> bool:
    position = positions.get(number)
    return position is not None and position.group == group


def _lacking_in_new_group(states: Mapping[int, RankState]) -> dict[Hashable, tuple[Hashable, ...]]:
    """Make each rank in ``new_group`` wait for the ranks that have called it less often."""
    inside = [n for n, state in states.items() if state.doing is Activity.NEW_GROUP]
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


def _way_around(start: int, component: set[Hashable], edges: Edges) -> tuple[tuple[int, int], ...]:
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
    return tuple(pairwise(ranks))
