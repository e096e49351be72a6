"""Process groups: who is a member, and how far each member has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import POINT_TO_POINT, GroupState, Job, Rank
from ddpdoctor.model.words import rank_list

from ddpdoctor.rules.progress.states import NATIVE_PHASES, Activity, RankState, is_collective, is_collective_op

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


TAKES_NO_NUMBER = "monitored_barrier"
"""Its records carry the number of the next collective, so after it has ended, that collective is still to be made."""
DEFAULT_GROUP = "0"
"""torch's name for the group of all ranks."""


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
    seq: int | None
    """None if its number is not known: a collective of C++ in a process that did not answer."""


def world_of(facts: Job) -> int:
    """Return how many ranks the job has: the largest number that anything shows."""
    known = [rank.world_size for rank in facts.ranks if rank.world_size is not None]
    asked = [facts.world_size] if facts.world_size is not None else []
    seen = [1 + max((rank.rank for rank in facts.ranks), default=-1)]
    return max(known or asked or seen)


def group_table(facts: Job) -> dict[tuple[int, str], Group]:
    """Return the group for each rank and group name; what a dead rank did not record comes from its peers."""
    table: dict[tuple[int, str], Group] = {}
    reported = dict.fromkeys(
        Group(state.name, state.ranks, state.mesh_dim) for rank in facts.ranks for state in rank.groups
    )
    for group in reported:
        for member in group.members:
            table.setdefault((member, group.name), group)
    return table


def default_name(rank: Rank) -> str:
    """Return the name of the group that DDP uses if nothing else is known: the group of all ranks."""
    names = [state.name for state in rank.groups]
    return DEFAULT_GROUP if DEFAULT_GROUP in names or not names else names[0]


def native_group(state: RankState) -> str:
    """Return the name of the group in which a phase of DDP makes its collectives: the model's group, if recorded.

    A backward is recorded with the group of the model that ran last. If several models have groups of their own, it is
    the group whose counter has moved since.
    """
    call = state.call
    noted = (call.group if call is not None else "") or default_name(state.rank)
    if call is None or call.op != "backward" or len({model.group for model in state.rank.models} | {noted}) == 1:
        return noted
    others = {model.group for model in state.rank.models} - {noted}
    moved = [name for name in sorted(others) if _has_moved(state.rank, name, _last_known(state.rank, name))]
    return moved[0] if len(moved) == 1 and not _has_moved(state.rank, noted, call.begun) else noted


def _has_moved(rank: Rank, name: str, since: int | None) -> bool:
    """Return whether the group's counter is above a number; False if either is not known."""
    group = own_state(rank, name)
    return group is not None and bool(group.backend) and since is not None and group.enqueued > since


def _last_known(rank: Rank, name: str) -> int:
    """Return the highest number of a group in any record."""
    log = pack_calls(rank.recent_calls)
    return max((log.numbers[at] for kind, at in log.last.items() if kind.group == name), default=0)


def group_words(group: Group, world: int, among: Iterable[Group] = ()) -> str:
    """Return a group as the user knows it: by its mesh dimension and its members.

    torch's own name is added if other groups have the same members.
    """
    twins = [other for other in among if other.members == group.members and other != group]
    name = f" ({group.name})" if twins else ""
    if group.members == tuple(range(world)):
        return f"the group of all ranks{name}"
    if group.mesh_dim:
        return f"the {dim_words(group)} group ({rank_list(group.members)})"
    return f"the group of {rank_list(group.members)}{name}"


def dim_words(group: Group) -> str:
    """Return the name of a group's mesh dimension; torch calls unnamed ones ``dim_0`` and so on."""
    number = group.mesh_dim.removeprefix("dim_")
    return f"mesh dimension {number}" if number.isdigit() else group.mesh_dim


def find_group(table: Mapping[tuple[int, str], Group], rank: Rank, name: str, world: int) -> Group:
    """Return the group of this name that the rank is in; an unknown name means all ranks."""
    return table.get((rank.rank, name)) or Group(name, tuple(range(world)))


def own_state(rank: Rank, name: str) -> GroupState | None:
    """Return the group as this rank sees it."""
    return next((state for state in rank.groups if state.name == name), None)


def recorded_seq(rank: Rank, name: str) -> int:
    """Return the number of the rank's last recorded collective in the group, or 0 if there is none."""
    log = pack_calls(rank.recent_calls)
    ended = [
        log.numbers[at] - (kind.op == TAKES_NO_NUMBER and not kind.failed)
        for kind, at in log.last.items()
        if kind.group == name and is_collective_op(kind.op)
    ]
    pending = [c.seq for c in rank.open_calls if c.seq is not None and c.group == name and is_collective(c)]
    return max([0, *ended, *pending])


def native_seq(state: RankState, name: str) -> int | None:
    """Return the number of the C++ collective that the rank waits in, or None if it is not known.

    If a process did not answer, only its records say how far the group was when the phase began. Under DETAIL, the
    group's counter does not yet include the collective that is pending in the fingerprint check.
    """
    group = own_state(state.rank, name)
    if group is None or group.enqueued < 0:
        return None
    if not group.backend and state.call is not None and state.call.begun is not None:
        return state.call.begun + 1
    return max(group.enqueued + state.detail, 1)


def position_of(state: RankState, table: Mapping[tuple[int, str], Group], world: int) -> CallPosition | None:
    """Return the collective that a rank waits in, or None if it waits in none."""
    call = state.call
    if call is None or state.doing not in (Activity.COLLECTIVE, Activity.NATIVE):
        return None
    if call.op in NATIVE_PHASES:
        name = native_group(state)
        return CallPosition(group=find_group(table, state.rank, name, world), seq=native_seq(state, name))
    return CallPosition(group=find_group(table, state.rank, call.group, world), seq=call.seq)


def reached(state: RankState, name: str) -> int | None:
    """Return the last collective of the group that a rank has reached, or None if its number is not known."""
    recorded = recorded_seq(state.rank, name)
    if state.doing is Activity.NATIVE and name == native_group(state):
        native = native_seq(state, name)
        return None if native is None else max(recorded, native)
    group = own_state(state.rank, name)
    return max(recorded, group.enqueued if group is not None else 0)


def peer_calls(states: Iterable[RankState]) -> dict[tuple[int, int | None], set[str]]:
    """Return the pending point-to-point operations, by rank and peer."""
    found: dict[tuple[int, int | None], set[str]] = {}
    for state in states:
        for call in state.rank.open_calls:
            if call.op in POINT_TO_POINT:
                found.setdefault((state.rank.rank, call.peer), set()).add(call.op)
    return found
