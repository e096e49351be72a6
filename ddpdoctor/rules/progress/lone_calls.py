"""Finds a collective that only some ranks call: at the end of the script, or under a condition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.findings import Confidence

from ddpdoctor.rules.progress.conflicts import Blame, Conflict
from ddpdoctor.rules.progress.detours import Route, find_detours
from ddpdoctor.rules.progress.groups import recorded_seq
from ddpdoctor.rules.progress.states import stack_of
from ddpdoctor.rules.progress.timeline import line_key, read_timeline
from ddpdoctor.rules.progress.turning import NO_LINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.facts import CallKind, ControlFlow, Rank
    from ddpdoctor.model.stacks import Frame

    from ddpdoctor.rules.progress.groups import CallPosition, Group
    from ddpdoctor.rules.progress.states import RankState
    from ddpdoctor.rules.progress.timeline import TimelineEntry


def find_guard(
    flows: Sequence[ControlFlow], caller: Sequence[Frame], others: Iterable[Frame | None], *, over: bool
) -> Frame | None:
    """Return the line of the condition around a rank's call, if another rank went around it, else None.

    ``caller`` is the stack of the call, ``others`` are the known lines of that other rank. If its script is ``over``,
    it may also have left by a `return` above the call; if there is one, the result is None.
    """
    lines = [frame for frame in others if frame is not None]
    for frame in reversed([frame for frame in caller if frame.user]):
        flow = next((flow for flow in flows if flow.file == frame.file), None)
        if flow is None:
            return None
        shared = [line.line for line in lines if (line.file, line.function) == (frame.file, frame.function)]
        if frame.function == "<module>" and not shared:
            return None  # such as the condition on __name__, which holds for every rank
        before = max((line for line in shared if line < frame.line), default=None)
        after = NO_LINE if over else None
        passed = {one.line for one in flow.statements if any(one.holds_both(frame.line, line) for line in shared)}
        ways = find_detours(flow, Route(left_out=frame.line, before=before, failed=False, after=after))
        found = [one for one in ways if one.jump is not None or one.ends_loop or one.condition not in passed]
        guards = [one for one in found if one.jump is None and not one.ends_loop]
        if guards and (len(guards) == len(found) or not shared):
            return replace(frame, line=guards[-1].condition)
        if shared or found:
            return None
    return None


def blame_guarded(
    parts: Sequence[TimelineEntry], states: Mapping[int, RankState], flows: Sequence[ControlFlow]
) -> Blame | None:  # fmt: skip
    """Return which of two ranks makes a conditional call that the other never made, or None if that is not clear.

    If the other's call is in the other branch of that condition, each of them makes a call that the other never made.
    """
    if len(parts) != 2:
        return None
    found: dict[int, Frame] = {}
    for part, other in (parts, parts[::-1]):
        rank, peer = states[part.rank].rank, states[other.rank].rank
        frames = call_frames(peer, other.site)
        guard = find_guard(flows, call_frames(rank, part.site), frames, over=False)
        if guard is None or has_called(peer, part.kind):
            continue
        lines = [frame.line for frame in frames if (frame.file, frame.function) == (guard.file, guard.function)]
        branches = [one for flow in flows if flow.file == guard.file for one in flow.statements]
        if any(one.kind == "if" and one.line == guard.line and any(map(one.holds, lines)) for one in branches):
            return None
        found[part.rank] = guard
    if len(found) != 1:
        return None
    ((blamed, guard),) = found.items()
    reason = f"its call is under the condition at line {guard.line}, and the other rank never made that call"
    return Blame(ranks=(blamed,), confidence=Confidence.MEDIUM, reason=reason)


def call_frames(rank: Rank, site: Frame | None) -> tuple[Frame, ...]:
    """Return the stack of a rank's call; its line alone if it has gone on: calls on a device return at once."""
    stack = stack_of(rank)
    inside = site is None or any((frame.file, frame.line) == (site.file, site.line) for frame in stack)
    return stack if inside or site is None else (site,)


def has_called(rank: Rank, wanted: CallKind) -> bool:
    """Return whether a rank has made a call at this line, as far as its records go back."""
    log = pack_calls(rank.recent_calls)
    return any(line_key(kind) == line_key(wanted) for kind in log.kinds)


MOST_RECORDS = 256
"""Our choice: how many of a rank's latest records are searched for its first lone call."""


def find_lone_call(
    states: Mapping[int, RankState],
    positions: Mapping[int, CallPosition],
    left: Sequence[int],
    flows: Sequence[ControlFlow],
) -> Conflict | None:
    """Return the call that only the waiting ranks make, if the ranks in ``left`` had passed its line.

    A rank that leaves a loop too early is a different case: the others then wait in a call that all ranks made before.
    """
    for group in dict.fromkeys(position.group for position in positions.values()):
        callers = [states[n] for n in group.members if n in positions and positions[n].group == group]
        gone = [states[n].rank for n in group.members if n in set(left)]
        if callers and len(callers) <= len(gone) and len(callers) + len(gone) == len(group.members):
            found = _lone_call(group, callers, gone, flows)
            if found is not None:
                return found
    return None


def _lone_call(
    group: Group, callers: Sequence[RankState], gone: Sequence[Rank], flows: Sequence[ControlFlow]
) -> Conflict | None:
    blame = _blame(callers, gone, flows)
    found = [_first_lone(state, group, gone) for state in callers] if blame is not None else []
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


def _first_lone(state: RankState, group: Group, gone: Sequence[Rank]) -> tuple[int, TimelineEntry] | None:
    """Return a rank's first call without a counterpart, with its number, or None if it made the same call before.

    The rank waits in the last one. Earlier ones may have returned: the root of a broadcast does not wait.
    """
    entries = read_timeline(state, group.name, most=MOST_RECORDS).entries
    known = {line_key(kind) for rank in gone for kind in pack_calls(rank.recent_calls).counts}
    come = max(recorded_seq(rank, group.name) for rank in gone)
    first: tuple[int, TimelineEntry] | None = None
    lone = set()
    for number in sorted(entries, reverse=True):
        entry = entries[number]
        if number <= come or line_key(entry.kind) in known:
            break
        first = (number, entry)
        lone.add(entry.place)
    return None if first is None or _was_made_before(state.rank, first[1], lone) else first


def _was_made_before(rank: Rank, entry: TimelineEntry, lone: set[int]) -> bool:
    """Return whether the rank had called this line before, when all ranks still took part."""
    log = pack_calls(rank.recent_calls)
    line = line_key(entry.kind)
    same = {at for at, kind in enumerate(log.kinds) if line_key(kind) == line}
    return any(index not in lone for which, index in zip(log.which, log.indexes, strict=True) if which in same)


def _blame(callers: Sequence[RankState], gone: Sequence[Rank], flows: Sequence[ControlFlow]) -> Blame | None:
    """Blame the callers if each rank that left came further in the script or went around a condition.

    If no source was read, it is enough that each of them destroyed the group.
    """
    ranks = tuple(state.rank.rank for state in callers)
    stacks = [call_frames(state.rank, state.call.site if state.call is not None else None) for state in callers]
    if all(_has_passed(rank, frames) for rank in gone for frames in stacks):
        return Blame(
            ranks=ranks, confidence=Confidence.HIGH, reason="the other ranks passed that line without calling it"
        )
    guards = [find_guard(flows, frames, _last_lines(rank), over=True) for rank in gone for frames in stacks]
    if guards and guards[0] is not None and None not in guards:
        reason = f"it is under the condition at line {guards[0].line}, which is false on the other ranks"
        return Blame(ranks=ranks, confidence=Confidence.HIGH, reason=reason)
    made = ({kind.op for kind in pack_calls(rank.recent_calls).counts} for rank in gone)
    if all("destroy_process_group" in ops for ops in made):
        reason = "the other ranks destroyed the group without calling it, and no rank had called it before"
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
