"""Finds a collective at the end of the script that only some ranks call, while the others skip it and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.findings import Confidence

from .blame import Blame, Part
from .conflicts import Conflict
from .groups import recorded_seq
from .guards import find_guard
from .states import stack_of
from .timeline import line_key, read_timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.control_flow import ControlFlow
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.stacks import Frame

    from .groups import Group, Position
    from .states import State
    from .timeline import Entry

MOST_RECORDS = 256
"""Our choice: how many of a rank's latest records are searched for its first lone call."""


def find_lone_call(
    states: Mapping[int, State],
    positions: Mapping[int, Position],
    left: Sequence[int],
    flows: Sequence[ControlFlow],
    *,
    detail: bool,
) -> Conflict | None:
    """Return the call that only the waiting ranks make, if the ranks in ``left`` had passed its line.

    A rank that leaves a loop too early is a different case: the others then wait in a call that all ranks made before.
    """
    for group in dict.fromkeys(position.group for position in positions.values()):
        callers = [states[n] for n in group.members if n in positions and positions[n].group == group]
        gone = [states[n].rank for n in group.members if n in set(left)]
        if callers and len(callers) <= len(gone) and len(callers) + len(gone) == len(group.members):
            found = _lone_call(group, callers, gone, flows, detail=detail)
            if found is not None:
                return found
    return None


def _lone_call(
    group: Group, callers: Sequence[State], gone: Sequence[Rank], flows: Sequence[ControlFlow], *, detail: bool
) -> Conflict | None:
    blame = _blame([state.rank for state in callers], gone, flows)
    found = [_first_lone(state, group, gone, detail=detail) for state in callers] if blame is not None else []
    calls = [call for call in found if call is not None]
    if blame is None or len(calls) < len(callers):
        return None
    return Conflict(
        group=group,
        seq=min(number for number, _ in calls),
        parts=tuple(part for _, part in calls),
        blame=blame,
        passed=False,
        left=tuple(rank.rank for rank in gone),
    )


def _first_lone(state: State, group: Group, gone: Sequence[Rank], *, detail: bool) -> tuple[int, Part] | None:
    """Return a rank's first call without a counterpart, with its number, or None if it made the same call before.

    The rank waits in the last one. Earlier ones may have returned: the root of a broadcast does not wait.
    """
    entries = read_timeline(state, group.name, detail=detail, most=MOST_RECORDS).entries
    known = {line_key(kind) for rank in gone for kind in pack_calls(rank.recent_calls).counts}
    come = max(recorded_seq(rank, group.name) for rank in gone)
    first: tuple[int, Entry] | None = None
    lone = set()
    for number in sorted(entries, reverse=True):
        entry = entries[number]
        if number <= come or line_key(entry.kind) in known:
            break
        first = (number, entry)
        lone.add(entry.place)
    if first is None or _was_made_before(state.rank, first[1], lone):
        return None
    number, entry = first
    part = Part(
        rank=state.rank.rank, kind=entry.kind, native=entry.native, place=entry.place, started_ns=entry.started_ns
    )
    return number, part


def _was_made_before(rank: Rank, entry: Entry, lone: set[int]) -> bool:
    """Return whether the rank had called this line before, when all ranks still took part."""
    log = pack_calls(rank.recent_calls)
    line = line_key(entry.kind)
    same = {at for at, kind in enumerate(log.kinds) if line_key(kind) == line}
    return any(index not in lone for which, index in zip(log.which, log.indexes, strict=True) if which in same)


def _blame(callers: Sequence[Rank], gone: Sequence[Rank], flows: Sequence[ControlFlow]) -> Blame | None:
    """Blame the callers if each rank that left came further in the script or went around a condition.

    If no source was read, it is enough that each of them destroyed the group.
    """
    ranks = tuple(rank.rank for rank in callers)
    if all(_has_passed(rank, stack_of(caller)) for rank in gone for caller in callers):
        return Blame(ranks=ranks, confidence=Confidence.HIGH, reason="the other ranks passed its line without it")
    guards = [find_guard(flows, caller, _last_lines(rank), over=True) for rank in gone for caller in callers]
    if guards and None not in guards:
        reason = f"it stands under the condition at line {guards[0]}, which the other ranks went around"
        return Blame(ranks=ranks, confidence=Confidence.HIGH, reason=reason)
    if all(_destroyed(rank) for rank in gone):
        reason = "the other ranks destroyed the group without it, and no rank had called it before"
        return Blame(ranks=ranks, confidence=Confidence.MEDIUM, reason=reason)
    return None


def _has_passed(rank: Rank, frames: Iterable[Frame]) -> bool:
    """Return whether a rank's last known line is below the line of one of these frames in the same function."""
    return any(
        frame.user and (frame.file, frame.function) == (line.file, line.function) and line.line > frame.line
        for frame in frames
        for line in _last_lines(rank)
    )


def _last_lines(rank: Rank) -> list[Frame]:
    """Return the line of the exit call and the line of the last call."""
    last = pack_calls(rank.recent_calls).last_of_kinds(lambda kind: kind.site is not None)
    return [frame for frame in (rank.exit_call, last.site if last is not None else None) if frame is not None]


def _destroyed(rank: Rank) -> bool:
    return any(kind.op == "destroy_process_group" for kind in pack_calls(rank.recent_calls).counts)
