"""Process groups, how far each member has come in them, and which ranks wait for which.

Ranks and pending collectives are nodes, so the cost grows with the ranks, not their pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.facts import POINT_TO_POINT, GroupState, Job, Rank
from ddpdoctor.model.words import grouped, rank_list
from ddpdoctor.rules.progress.states import NOT_COLLECTIVES, Activity, RankState

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    Edges = Mapping[Hashable, tuple[Hashable, ...]]
    States = Mapping[int, RankState]
    Positions = Mapping[int, "CallPosition"]
    Groups = Mapping[tuple[int, str], "Group"]  # by rank and name

Node = TypeVar("Node", bound="Hashable")
# Its records carry the number of the next collective, so after it has ended, that collective is still to be made.
TAKES_NO_NUMBER = "monitored_barrier"
DEFAULT_GROUP = "0"  # torch's name for the group of all ranks
_SENDS = frozenset({"send", "isend"})
_RECEIVES = frozenset({"recv", "irecv"})


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its name and its members. Groups with different members may share a name."""

    name: str
    members: tuple[int, ...]
    mesh_dim: str = field(default="", compare=False)

    def __hash__(self) -> int:
        """Return a hash that costs the same for any number of members."""
        return hash((self.name, self.members[:2], len(self.members)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPosition:
    """The collective that a rank waits in."""

    group: Group
    seq: int | None  # None if its number is not known: a collective of C++ in a process that did not answer


def world_of(facts: Job) -> int:
    known = [rank.world_size for rank in facts.ranks if rank.world_size is not None]
    asked = [facts.world_size] if facts.world_size is not None else []
    seen = [1 + max((rank.rank for rank in facts.ranks), default=-1)]
    return max(known or asked or seen)


def group_table(facts: Job) -> dict[tuple[int, str], Group]:
    """Return the group for each rank and group name; what a dead rank did not record comes from its peers."""
    table: dict[tuple[int, str], Group] = {}
    states = (state for rank in facts.ranks for state in rank.groups)
    reported = dict.fromkeys(Group(state.name, state.ranks, state.mesh_dim) for state in states)
    for group in reported:
        for member in group.members:
            table.setdefault((member, group.name), group)
    return table


def default_name(rank: Rank) -> str:
    names = [state.name for state in rank.groups]
    return DEFAULT_GROUP if DEFAULT_GROUP in names or not names else names[0]


def native_group(state: RankState) -> str:
    """Return the name of the group in which a phase of DDP makes its collectives: the model's group, if recorded."""
    # A backward is recorded with the group of the model that ran last. If several models have groups of their own, it
    # is the group whose counter has moved since.
    call = state.call
    noted = (call.group if call is not None else "") or default_name(state.rank)
    if call is None or call.op != "backward" or len({model.group for model in state.rank.models} | {noted}) == 1:
        return noted
    others = {model.group for model in state.rank.models} - {noted}
    log = state.rank.recent_calls
    known = {
        name: max((log.numbers[at] for kind, at in log.last.items() if kind.group == name), default=0)
        for name in sorted(others)
    }
    moved = [name for name, last in known.items() if _has_moved(state.rank, name, last)]
    return moved[0] if len(moved) == 1 and not _has_moved(state.rank, noted, call.begun) else noted


def _has_moved(rank: Rank, name: str, since: int | None) -> bool:
    """Return whether the group's counter is above a number; False if either is not known."""
    group = own_state(rank, name)
    return group is not None and bool(group.backend) and since is not None and group.enqueued > since


def group_words(group: Group, world: int, among: Iterable[Group] = ()) -> str:
    """Return a group as the user knows it: by its mesh dimension and its members."""
    # torch's own name is added if other groups have the same members.
    twins = [other for other in among if other.members == group.members and other != group]
    name = f" ({group.name})" if twins else ""
    if group.members == tuple(range(world)):
        return f"the group of all ranks{name}"
    if group.mesh_dim:
        return f"the {dim_words(group)} group ({rank_list(group.members)})"
    return f"the group of {rank_list(group.members)}{name}"


def dim_words(group: Group) -> str:
    number = group.mesh_dim.removeprefix("dim_")
    return f"mesh dimension {number}" if number.isdigit() else group.mesh_dim


def find_group(table: Groups, rank: Rank, name: str, world: int) -> Group:
    return table.get((rank.rank, name)) or Group(name, tuple(range(world)))


def own_state(rank: Rank, name: str) -> GroupState | None:
    return next((state for state in rank.groups if state.name == name), None)


def recorded_seq(rank: Rank, name: str) -> int:
    """Return the number of the rank's last recorded collective in the group, or 0 if there is none."""
    log = rank.recent_calls
    last = ((kind, log.numbers[at]) for kind, at in log.last.items() if kind.group == name)
    joint = [(kind, number) for kind, number in last if kind.op not in NOT_COLLECTIVES]
    ended = [number - (kind.op == TAKES_NO_NUMBER and not kind.failed) for kind, number in joint]
    own = [call for call in rank.open_calls if call.group == name and call.op not in NOT_COLLECTIVES]
    return max([0, *ended, *(call.seq or 0 for call in own)])


def native_seq(state: RankState, name: str) -> int | None:
    """Return the number of the C++ collective that the rank waits in, or None if it is not known."""
    # If a process did not answer, only its records say how far the group was when the phase began. Under DETAIL, the
    # group's counter does not yet include the collective that is pending in the fingerprint check.
    group = own_state(state.rank, name)
    if group is None or group.enqueued < 0:
        return None
    if not group.backend and state.call is not None and state.call.begun is not None:
        return state.call.begun + 1
    return max(group.enqueued + state.detail, 1)


def positions_of(states: States, table: Groups, world: int) -> dict[int, CallPosition]:
    found = {}
    for number, state in states.items():
        if state.call is not None and state.doing in (Activity.COLLECTIVE, Activity.NATIVE):
            name, seq = state.call.group, state.call.seq
            if state.doing is Activity.NATIVE:
                name = native_group(state)
                seq = native_seq(state, name)
            found[number] = CallPosition(group=find_group(table, state.rank, name, world), seq=seq)
    return found


def reached(state: RankState, name: str) -> int | None:
    """Return the last collective of the group that a rank has reached, or None if its number is not known."""
    recorded = recorded_seq(state.rank, name)
    if state.doing is Activity.NATIVE and name == native_group(state):
        native = native_seq(state, name)
        return None if native is None else max(recorded, native)
    group = own_state(state.rank, name)
    return max(recorded, group.enqueued if group is not None else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The result of following all waits of a job."""

    waiters: tuple[int, ...]  # ranks that can go on only if others do their part
    blockers: tuple[int, ...]  # ranks that others wait for, but that wait for nobody: the roots
    absent: tuple[int, ...]  # ranks that others wait for, but that have no process


def find_waits(states: States, positions: Positions, world: int) -> Waits:
    waiters = tuple(sorted(number for number, state in states.items() if state.waiting))
    edges = wait_edges(states, positions)
    # The last number waited for, in groups in which any is known: then calls without a number do not count.
    last = {node.group: node.seq for node in edges if isinstance(node, CallPosition) and node.seq is not None}
    needed = needed_in_init(states, world)
    for node, nexts in edges.items():
        if not isinstance(node, CallPosition) or node.seq is not None or node.group not in last:
            needed.update(peer for peer in nexts if isinstance(peer, int))
    for group in {position.group for position in positions.values()}:
        needed.update(member for member in group.members if member not in states)
    absent = {n for n in needed if n not in states or states[n].doing is Activity.MISSING}
    blockers = {n for n in needed - absent if not states[n].waiting}
    if not blockers and not absent:
        # Ranks in a backward that has not begun the collective the others wait in still compute. This shows only
        # without DETAIL, when the counter tells which ranks already wait for the reducer.
        for n, position in positions.items():
            computes = states[n].doing is Activity.NATIVE and not states[n].detail
            if computes and position.seq is not None and position.seq < last[position.group]:
                blockers.add(n)
    return Waits(waiters=waiters, blockers=tuple(sorted(blockers)), absent=tuple(sorted(absent)))


def needed_in_init(states: States, world: int) -> set[int]:
    if not any(state.doing is Activity.INIT for state in states.values()):
        return set()
    here = {n for n, state in states.items() if state.doing is Activity.INIT or state.rank.initialized}
    return set(range(world)) - here


def waiting_peers(states: States, *, met: bool) -> dict[int, int]:
    """Return the ranks that wait in a point-to-point call, each with its peer."""
    # ``met``: those whose peer waits in the other half of the same transfer; else those whose other half is not
    # pending.
    calls = {n: state.call for n, state in states.items() if state.doing is Activity.PEER and state.call is not None}
    every = ((n, call) for n, state in states.items() for call in state.rank.open_calls)  # all parts of a batch
    pending = {(n, call.peer, call.op) for n, call in every if call.op in POINT_TO_POINT}
    found: dict[int, int] = {}
    for number, call in calls.items():
        halves = _RECEIVES if call.op in _SENDS else _SENDS
        is_pending = any((call.peer, number, half) in pending for half in halves)
        if met:
            is_found = is_pending and call.peer in calls and calls[call.peer].peer == number
        else:
            is_found = not is_pending and call.peer != number
        if is_found and call.peer is not None:
            found[number] = call.peer
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCircle:
    """Ranks that each, in the end, wait for themselves."""

    ranks: tuple[int, ...]
    # A shortest path from the first rank around and back to it: pairs of a rank and the rank that it waits for.
    links: tuple[tuple[int, int], ...]


def find_circles(states: States, positions: Positions) -> tuple[WaitCircle, ...]:
    """Return all circles. Each rank points to the collective it waits in, each collective to the ranks it lacks."""
    edges = wait_edges(states, positions)
    found = []
    for component in _components(edges):
        ranks = sorted(node for node in component if isinstance(node, int))
        if len(ranks) > 1:
            around = [node for node in way_back(ranks[0], edges) if isinstance(node, int)]
            found.append(WaitCircle(ranks=tuple(ranks), links=tuple(pairwise([*around, ranks[0]]))))
    return tuple(sorted(found, key=lambda circle: circle.ranks))


def wait_edges(states: States, positions: Positions) -> Edges:
    """Return the links from each waiting rank to its pending call, and from each call to the ranks it lacks."""
    # A call may also lead to an earlier call of its group, which then comes before it in the mapping.
    edges: dict[Hashable, tuple[Hashable, ...]] = {n: (position,) for n, position in positions.items()}
    by_group = grouped((position.group, position.seq) for position in positions.values())
    for group, numbers in by_group.items():
        # A call lacks the members below its number, and everyone that an earlier one lacks. This way each member is
        # checked once per group, however many numbers are waited for.
        here = {n for n in group.members if n in states}
        come = {n: reached(states[n], group.name) for n in here}
        before: tuple[Hashable, ...] = ()
        left = {n for n, number in come.items() if number is not None}
        for seq in sorted({number for number in numbers if number is not None}):
            late = {n for n in left if (come[n] or 0) < seq}
            left -= late
            edges[CallPosition(group=group, seq=seq)] = (*before, *sorted(late))
            before = (CallPosition(group=group, seq=seq),)
        if None in numbers:
            away = [n for n in sorted(here) if n not in positions or positions[n].group != group]
            edges[CallPosition(group=group, seq=None)] = tuple(away)
    edges |= {number: (peer,) for number, peer in waiting_peers(states, met=False).items()}
    inside = [n for n, state in states.items() if state.doing is Activity.NEW_GROUP]
    if inside:  # each rank in ``new_group`` waits for the ranks that have called it less often
        logs = {n: state.rank.recent_calls.counts for n, state in states.items()}
        made = {n: sum(count for kind, count in log.items() if kind.op == "new_group") for n, log in logs.items()}
        for n, state in states.items():
            made[n] += sum(call.op == "new_group" for call in state.rank.open_calls)
        most = max(made[n] for n in inside)
        node = ("new_group", most)
        edges[node] = tuple(n for n in sorted(made) if made[n] < most)
        edges |= {n: (node,) for n in inside if made[n] == most}
    return edges


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
                    component: set[Hashable] = set()
                    while node not in component:
                        component.add(stack.pop())
                    waiting -= component
                    found.append(component)
            elif step not in order:
                order[step] = low[step] = len(order)
                stack.append(step)
                waiting.add(step)
                work.append((step, iter(edges.get(step, ()))))
            elif step in waiting:
                low[node] = min(low[node], order[step])
    return found


def way_back(start: Node, edges: Mapping[Node, Iterable[Node]]) -> list[Node]:
    """Return the nodes of a shortest circle through a node, beginning with it; none if there is none."""
    came_from: dict[Node, Node] = {}
    queue = [start]
    for node in queue:
        for step in edges.get(node, ()):
            if step == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if step not in came_from:
                came_from[step] = node
                queue.append(step)
    return []
