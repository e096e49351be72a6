"""Who waits for whom. Nodes are ranks and pending collectives, so the cost grows with the ranks, not their pairs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls

from .groups import Group, Position, peer_calls, reached
from .states import NATIVE_PHASES, Doing, State

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.facts import Rank

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
    states: Mapping[int, State], positions: Mapping[int, Position], world: int, *, detail: bool
) -> Waits:  # fmt: skip
    """Follow the waits of all ranks to the ranks that wait for nobody."""
    waiters = tuple(sorted(number for number, state in states.items() if state.waiting))
    needed = _needed_in_groups(states, positions, detail=detail)
    needed |= _needed_in_init(states, world)
    needed |= _needed_in_new_group(states)
    needed |= set(unanswered_peers(states).values())
    absent = {n for n in needed if n not in states or states[n].doing is Doing.MISSING}
    blockers = {n for n in needed - absent if not states[n].waiting}
    if not blockers and not absent:
        blockers = _behind(states, positions, detail=detail)
    return Waits(
        waiters=waiters,
        blockers=tuple(sorted(blockers)),
        absent=tuple(sorted(absent)),
    )


def furthest(positions: Mapping[int, Position]) -> dict[Group, int | None]:
    """Return, for each group with waiters, the last number waited for, or None if no number is known."""
    found: dict[Group, int | None] = {}
    for position in positions.values():
        known = found.get(position.group)
        if position.seq is not None:
            found[position.group] = max(known or 0, position.seq)
        else:
            found.setdefault(position.group, None)
    return found


def _needed_in_groups(states: Mapping[int, State], positions: Mapping[int, Position], *, detail: bool) -> set[int]:
    """Return the members that have not arrived and are in no collective themselves."""
    needed = set()
    for group, seq in furthest(positions).items():
        for member in group.members:
            state = states.get(member)
            if state is None or not (state.waiting or _has_arrived(state, group.name, seq, detail=detail)):
                needed.add(member)
    return needed


def _has_arrived(state: State, name: str, seq: int | None, *, detail: bool) -> bool:
    if seq is None:
        return False
    come = reached(state, name, detail=detail)
    return come is None or come >= seq


def _needed_in_init(states: Mapping[int, State], world: int) -> set[int]:
    """Return the ranks of the world that are neither in ``init_process_group`` nor past it."""
    if not any(state.doing is Doing.INIT for state in states.values()):
        return set()
    here = {n for n, state in states.items() if state.doing is Doing.INIT or state.rank.initialized}
    return set(range(world)) - here


def _needed_in_new_group(states: Mapping[int, State]) -> set[int]:
    """Return the ranks that have called ``new_group`` less often than a rank that waits in it."""
    made = {n: groups_made(state.rank) for n, state in states.items()}
    most = max((made[n] for n, state in states.items() if state.doing is Doing.NEW_GROUP), default=0)
    return {n for n, state in states.items() if not state.waiting and made[n] < most}


def groups_made(rank: Rank) -> int:
    """Return how often a rank has called ``new_group``."""
    ended = sum(count for kind, count in pack_calls(rank.recent_calls).counts.items() if kind.op == "new_group")
    return ended + sum(call.op == "new_group" for call in rank.open_calls)


def unanswered_peers(states: Mapping[int, State]) -> dict[int, int]:
    """Return the ranks in a point-to-point call whose other half is not pending, each with its peer."""
    pending = peer_calls(states.values())
    found: dict[int, int] = {}
    for number, state in states.items():
        call = state.call
        if state.doing is not Doing.PEER or call is None or call.peer is None or call.peer == number:
            continue
        other_half = _RECEIVES if call.op in _SENDS else _SENDS
        if not pending.get((call.peer, number), frozenset()) & other_half:
            found[number] = call.peer
    return found


def met_peers(states: Mapping[int, State]) -> dict[int, int]:
    """Return the ranks that wait for a peer that waits in the other half of the same transfer, each with its peer."""
    calls = {n: state.call for n, state in states.items() if state.doing is Doing.PEER and state.call is not None}
    pending = peer_calls(states.values())  # all parts of a batch are pending
    found: dict[int, int] = {}
    for number, call in calls.items():
        other_half = _RECEIVES if call.op in _SENDS else _SENDS
        if call.peer not in calls or calls[call.peer].peer != number:
            continue
        if pending.get((call.peer, number), frozenset()) & other_half:
            found[number] = call.peer
    return found


def _behind(states: Mapping[int, State], positions: Mapping[int, Position], *, detail: bool) -> set[int]:
    """Return the ranks in a backward that has not begun the collective the others wait in: they still compute.

    This works only without DETAIL, when the counter shows which ranks already wait for the reducer.
    """
    last = furthest(positions)
    found = set()
    for number, position in positions.items():
        call = states[number].call
        target = last[position.group]
        native = call is not None and call.op in NATIVE_PHASES
        if native and not detail and position.seq is not None and target is not None and position.seq < target:
            found.add(number)
    return found


def by_position(positions: Mapping[int, Position]) -> dict[Position, list[int]]:
    """Return the ranks that wait in each pending collective."""
    found: dict[Position, list[int]] = defaultdict(list)
    for number, position in sorted(positions.items()):
        found[position].append(number)
    return dict(found)
