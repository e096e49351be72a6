"""Which lines of the user's code decide whether a rank reaches a call, and how a rank bypassed one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import JUMPS, LOOPS
from ddpdoctor.model.findings import Confidence
from ddpdoctor.rules.progress.calls import Blame, Conflict, Parting, find_parting, line_key, read_timeline
from ddpdoctor.rules.progress.states import NATIVE_PHASES, line_of, stack_of
from ddpdoctor.rules.progress.waits import recorded_seq

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import CallKind, ControlFlow, Rank, Statement
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.progress.calls import TimelineEntry
    from ddpdoctor.rules.progress.states import RankState
    from ddpdoctor.rules.progress.waits import Group, Positions, States

    Flows = Sequence[ControlFlow]
    Parts = tuple[TimelineEntry | None, TimelineEntry | None]

MOST_WAYS = 4  # most ways around a call that are listed
# What to do where the line that decided it is not known.
ALIKE = "look for a collective under a condition that differs between ranks, or for loops of unequal length"
NO_LINE = 0  # stands for the line of a rank whose script has ended: it is in no loop
AT_THE_END = 1 << 62  # used instead of an unknown number
MOST_RECORDS = 256  # our choice: how many of a rank's latest records are searched for its first lone call


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """One way to bypass a call."""

    condition: int  # the line of the condition, the handler or the loop
    jump: int | None = None  # the line of the `continue`, `break` or `return` under it
    ends_loop: bool = False  # the loop came to its end
    skips_round: bool = False  # the jump is a `continue`
    decided_at: tuple[int, ...] = ()  # as in ``Statement``, of the condition or the loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a rank did around a call that it skipped, as lines of the call's function; None if it was elsewhere."""

    left_out: int
    before: int | None  # its last line before the call was due
    failed: bool  # what it did there raised an exception
    after: int | None  # its line now
    # The rank has come back from the call's function, or has not called it: no loop in it goes on.
    returned: bool = False


def left_loop(flow: ControlFlow, route: Route) -> Statement | None:
    loop = loop_around(flow, route.left_out)
    is_out = route.returned or (route.after is not None and loop is not None and not loop.holds(route.after))
    return loop if is_out else None


def loop_around(flow: ControlFlow, line: int) -> Statement | None:
    return _innermost_statement(_around(flow, line), line, LOOPS)


def find_detours(flow: ControlFlow, route: Route) -> tuple[Detour, ...]:
    near = _around(flow, route.left_out)
    before = route.before if any(route.before is not None and part.holds(route.before) for part in near) else None
    loop = left_loop(flow, route)
    if loop is not None and route.returned:
        rounds = [jump for jump in near if jump.kind == "continue" and loop.line < jump.line < route.left_out]
        guards = [guard for guard in _guards(near, route.left_out, before, None) if loop.line < guard.condition]
        return (*_by_jump(near, rounds), *guards, *_out_of(near, loop))
    if loop is not None:
        return _out_of(near, loop)
    jumps = [statement for statement in near if statement.kind in JUMPS]
    if route.failed and before is not None:  # the handlers of the exception that was raised there
        attempt = _innermost_statement(near, before, {"try"})
        handlers = [part for part in near if part.kind == "except" and attempt is not None and attempt.holds(part.line)]
        if before >= min((handler.line for handler in handlers), default=0):
            return ()
        lines = [jump.line for jump in jumps]
        pairs = [(handler.line, next(filter(handler.holds, lines), None)) for handler in handlers]
        return tuple(Detour(condition=line, jump=jump) for line, jump in pairs)
    # A jump leads around the call after the last line that is known, else after the head of its loop.
    around = _innermost_statement(near, route.left_out, LOOPS)
    start = around.line if around is not None else 0
    if before is not None and before < route.left_out and (around is None or around.holds(before)):
        start = before
    passing = []
    for jump in jumps:
        own = _innermost_statement(near, jump.line, LOOPS)
        in_loop = jump.kind == "return" or (own is not None and own.holds(route.left_out))
        passing += [jump] if in_loop and start < jump.line < route.left_out else []
    guards = _guards(near, route.left_out, before, route.after)
    return (*_by_jump(near, passing), *guards)


def _guards(near: Sequence[Statement], left_out: int, before: int | None, after: int | None) -> list[Detour]:
    """Return the conditions around a call, without those that the rank passed: it is, or was, in the same branch."""
    return [
        Detour(condition=statement.line, decided_at=statement.decided_at)
        for statement in near
        if statement.kind == "if"
        and statement.holds(left_out)
        and not (before is not None and statement.holds(before))
        and not (after is not None and statement.holds_both(left_out, after))
    ]


def _out_of(near: Sequence[Statement], loop: Statement) -> tuple[Detour, ...]:
    inside = [statement for statement in near if statement.kind in JUMPS and loop.holds(statement.line)]
    own = [jump for jump in inside if jump.kind == "return" or _innermost_statement(near, jump.line, LOOPS) == loop]
    leaving = [statement for statement in own if statement.kind != "continue"]
    if loop.kind != "fixed-for":
        return (*_by_jump(near, leaving), Detour(condition=loop.line, ends_loop=True, decided_at=loop.decided_at))
    return _by_jump(near, leaving or own)


def _around(flow: ControlFlow, line: int) -> tuple[Statement, ...]:
    """Return the statements of the function that contains a line, without those of nested functions."""
    own = _innermost_statement(flow.statements, line, {"function"})
    found = []
    passed = 0
    for statement in flow.statements:
        outside = own is not None and not own.line <= statement.line <= own.last_line
        if outside or statement.line <= passed:
            continue
        if statement.kind == "function" and statement != own and not statement.holds(line):
            passed = statement.last_line
        else:
            found.append(statement)
    return tuple(found)


def _innermost_statement(statements: Iterable[Statement], line: int, kinds: Iterable[str]) -> Statement | None:
    holding = [statement for statement in statements if statement.kind in set(kinds) and statement.holds(line)]
    return min(holding, key=lambda statement: (statement.last_line - statement.line, -statement.line), default=None)


def _by_jump(near: Sequence[Statement], jumps: Iterable[Statement]) -> tuple[Detour, ...]:
    """Return each jump with its condition; leave out jumps without a condition, because all ranks take them."""
    pairs = ((_innermost_statement(near, jump.line, {"if", "except"}), jump) for jump in jumps)
    return tuple(
        Detour(condition=head.line, jump=jump.line, skips_round=jump.kind == "continue", decided_at=head.decided_at)
        for head, jump in pairs
        if head is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """How the blamed rank diverged from the others."""

    parting: Parting
    detours: tuple[Detour, ...]  # the ways in its code around what it left out; empty if its source is not known
    loop: Statement | None  # the loop that it left while the others went on in it
    call: Frame  # the line that was left out, in the function of those ways

    @property
    def lines(self) -> tuple[Frame, ...]:
        """The lines that decided it if there is only one way, else the last line before it."""
        if self.detours and (len(self.detours) == 1 or self.loop is not None):
            detour = self.detours[0]
            second = detour.jump if detour.jump is not None or self.loop is not None else self.call.line
            decided = detour.decided_at if len(detour.decided_at) == 1 else ()
            lines = (detour.condition, *decided, second)
            return tuple(replace(self.call, line=line) for line in lines if line is not None)
        turned_at = self.parting.before
        if self.parting.is_extra and self.parting.went_on is not None:
            turned_at = self.parting.went_on
        elif self.reduced_nothing:
            turned_at = self.parting.instead_of
        return (turned_at.site,) if turned_at is not None and turned_at.site is not None else ()

    @property
    def reduced_nothing(self) -> bool:
        went_on, due = self.parting.went_on, self.parting.instead_of
        return went_on is not None and due.op == "backward" and (went_on.op, went_on.site) == (due.op, due.site)

    @property
    def did(self) -> str:
        went_on, due = self.parting.went_on, self.parting.instead_of
        if self.parting.is_extra and went_on is not None:
            return f"called {went_on.op} ({line_of(went_on.site)}) once more than the others"
        skips = self.reduced_nothing or any(detour.skips_round for detour in self.detours)
        if self.loop is not None and self.detours and not skips:
            return f"left the loop ({line_of(replace(self.call, line=self.loop.line))}) before the others"
        return f"{'did not reduce in' if self.reduced_nothing else 'skipped'} {due.op} ({line_of(due.site)})"

    def words(self, who: str) -> str:
        before = self.parting.before
        after = f" after {before.op} ({line_of(before.site)})" if before is not None else ""
        ways = []
        for detour in self.detours[:MOST_WAYS]:
            jump = f" (jump at line {detour.jump})" if detour.jump not in (None, detour.condition) else ""
            if detour.decided_at:
                jump += f", decided at line {' or '.join(map(str, detour.decided_at[:MOST_WAYS]))}"
            what = "end of the loop" if detour.ends_loop else "condition"
            ways.append(f"the {what} at line {detour.condition}{jump}")
        decides = f"; the cause is {' or '.join(ways)}" if ways else ""
        return f"{who} {self.did}{after}{decides}"

    @property
    def fix(self) -> str:
        loop = self.loop
        if loop is None and self.parting.is_extra:
            return ALIKE
        if loop is None:
            if self.reduced_nothing:
                return "use no_sync() in the same steps on all ranks: count the micro-batches the same way"
            return "skip it on all ranks or on none: all_reduce the condition, or multiply the unwanted loss by zero"
        equally = f"all ranks run the loop at line {loop.line} equally often"
        if self.parting.is_extra:
            rest = "look for a call of that line under a condition that differs between ranks"
            return f"let {equally}; if they do, {rest}"
        if loop.kind == "while":
            return (
                f"all_reduce the decision to leave the loop at line {loop.line}, so that all ranks leave it in the "
                "same iteration: a clock or a loss differs between ranks"
            )
        if loop.kind == "for" and self.parting.instead_of.op not in NATIVE_PHASES:
            zeros = "with a zero where a rank has none, or put them into one tensor"
            return f"make {equally} and skip nothing in it: reduce the same names on every rank, {zeros}"
        return (
            "give every rank the same number of batches (DistributedSampler, drop_last=True), or use model.join(); if "
            "a rank decides to break or skip, all_reduce that decision"
        )


@dataclass(frozen=True, slots=True)
class Guard:
    """The condition that led the blamed rank to a call that no other rank has made."""

    line: Frame

    def words(self, _: str) -> str:
        return f"its call is under the condition at {line_of(self.line)}, and the other ranks never made that call"

    @property
    def fix(self) -> str:
        line = line_of(self.line)
        return f"let all ranks take the same branch at {line}: decide it on one rank and broadcast the decision"


def find_way(flows: Flows, states: States, conflict: Conflict, other: TimelineEntry) -> Turning | Guard | None:
    """Return how the first blamed rank diverged from another rank, or reached a call that only it makes."""
    mine = conflict.departing[0]
    state, peer = states[mine.rank], states[other.rank]
    turning = find_turning(flows, state, peer, conflict.group.name, conflict.seq, (mine, other))
    if turning is not None or any(has_called(states[part.rank].rank, mine.kind) for part in conflict.agreeing):
        return turning
    frames = call_frames(state.rank, mine.site), call_frames(peer.rank, other.site)
    guard = find_guard(flows, *frames, over=False)
    return Guard(guard) if guard is not None else None


def find_turning(flows: Flows, mine: RankState, other: RankState, group: str, seq: int, parts: Parts) -> Turning | None:
    """Return how a blamed rank diverged from another, or None if only the call itself is known."""
    # ``parts`` are their calls under the number ``seq``; None for a rank that has ended.
    own, usual = parts
    parting = find_parting(mine, other, group, seq)
    if (
        own is not None
        and own.kind.op == "backward"
        and usual is not None
        and not usual.native
        and (parting is None or parting.went_on is None)
    ):
        parting = Parting(before=own.kind, instead_of=usual.kind)
    if parting is None and own is not None and usual is not None and _went_past(mine, other, usual):
        parting = Parting(before=None, instead_of=usual.kind)
    if parting is None or parting.instead_of.site is None:
        return None
    plain = Turning(parting=parting, detours=(), loop=None, call=parting.instead_of.site)
    if parting.is_extra or plain.reduced_nothing:  # it went around no call
        return plain
    found = _look_up(flows, parting, (mine, other), parts)
    if parting.is_earlier or found.loop is not None or own is None:
        return found
    if found.detours and _is_in(usual, parting.instead_of):
        return found
    once_more, went_on, site = None, parting.went_on, parting.went_on.site if parting.went_on is not None else None
    repeats = went_on is not None and parting.before is not None and line_key(went_on) == line_key(parting.before)
    # It makes the call of a line again: the loop around it counts, if that may be longer on one rank.
    if repeats and went_on is not None and went_on.op not in NATIVE_PHASES and site is not None:
        around = next((loop_around(flow, site.line) for flow in flows if flow.file == site.file), None)
        around = around if around is not None and around.kind != "fixed-for" else None
        once_more = Turning(parting=replace(parting, is_extra=True), detours=(), loop=around, call=site)
    if usual is None or usual.site is None or _is_in(usual, parting.instead_of):
        return once_more
    # The others are past the first call that it left out, and their stacks show the way to the next.
    found = _look_up(flows, replace(parting, instead_of=usual.kind), (mine, other), parts)
    return found if found.loop is not None else once_more


def _went_past(mine: RankState, other: RankState, usual: TimelineEntry) -> bool:
    """Return whether a rank is below the line at which another is, and never made the call that the other is in."""
    made = {line_key(kind) for kind in mine.rank.recent_calls.counts}
    if usual.native or line_key(usual.kind) in made:
        return False
    ours, theirs = ([frame for frame in stack_of(state.rank) if frame.user] for state in (mine, other))
    for our, their in zip(ours, theirs, strict=False):
        if not _same_function(our, their):
            return False
        if our.line != their.line:
            return our.line > their.line
    return False


def _look_up(flows: Flows, parting: Parting, states: tuple[RankState, RankState], parts: Parts) -> Turning:
    """Look for ways to bypass the call in its own function; if there are none, in the functions that called it."""
    now, theirs = (stack_of(state.rank) for state in states)
    if not now and parts[0] is not None and parts[0].site is not None:
        now = (parts[0].site,)
    after = parting.went_on.site if parting.is_earlier and parting.went_on is not None else None
    own = (after,) if after is not None else now
    over = parts[0] is None and not parting.is_earlier
    # The line of the call that was due, and if a rank is still in it, the lines that led there.
    site = parting.instead_of.site
    frames = reversed(theirs) if _is_in(parts[1], parting.instead_of) else ()
    calls = [site, *(frame for frame in frames if frame.user and frame != site)] if site is not None else []
    before = parting.before.site if parting.before is not None else None
    was_there = before is not None and _same_function(before, calls[0])
    for depth, call in enumerate(calls):
        flow = next((flow for flow in flows if flow.file == call.file), None)
        if flow is None:
            continue
        at = NO_LINE if over else next((frame.line for frame in own if _same_function(frame, call)), None)
        outer = calls[depth + 1 :] or [frame for frame in theirs if not _same_function(frame, call)]
        # It has been there, as its last common act shows, and is at another line of a function further out now.
        elsewhere = [(mine, its) for mine in own for its in outer if mine.line != its.line]
        has_left = was_there and any(_same_function(mine, its) for mine, its in elsewhere)
        if call is not calls[0] and (at == call.line or (at is None and not has_left)):
            break  # as far as is known the rank is still in this call, so it did not go around it
        was_inside = before is not None and _same_function(before, call)
        route = Route(
            left_out=call.line,
            before=before.line if before is not None and was_inside else None,
            failed=parting.before is not None and parting.before.failed,
            after=at,
            returned=at is None
            and bool(now)
            and not any(_same_function(frame, call) for frame in now)
            and (was_inside or any(_same_function(frame, caller) for frame in now for caller in outer)),
        )
        found = find_detours(flow, route)
        if found:
            return Turning(parting=parting, detours=found, loop=left_loop(flow, route), call=call)
    return Turning(parting=parting, detours=(), loop=None, call=calls[0])


def _is_in(part: TimelineEntry | None, due: CallKind) -> bool:
    return part is not None and (part.kind.op, part.kind.site) == (due.op, due.site)


def _same_function(frame: Frame, other: Frame) -> bool:
    return (frame.file, frame.function) == (other.file, other.function)


def find_guard(flows: Flows, caller: Sequence[Frame], others: Iterable[Frame | None], *, over: bool) -> Frame | None:
    """Return the line of the condition around a rank's call, if another rank bypassed it, else None."""
    # ``caller`` is the stack of the call, ``others`` are the known lines of that other rank. If its script is ``over``,
    # it may also have left by a `return` above the call; if there is one, the result is None.
    lines = [frame for frame in others if frame is not None]
    for frame in reversed([frame for frame in caller if frame.user]):
        flow = next((flow for flow in flows if flow.file == frame.file), None)
        if flow is None:
            return None
        shared = [line.line for line in lines if _same_function(line, frame)]
        if frame.function == "<module>" and not shared:
            return None  # such as the condition on __name__, which holds for every rank
        before = max((line for line in shared if line < frame.line), default=None)
        after = NO_LINE if over else None
        passed = {part.line for part in flow.statements if any(part.holds_both(frame.line, line) for line in shared)}
        ways = find_detours(flow, Route(left_out=frame.line, before=before, failed=False, after=after))
        found = [way for way in ways if way.jump is not None or way.ends_loop or way.condition not in passed]
        guards = [detour for detour in found if detour.jump is None and not detour.ends_loop]
        if guards and (len(guards) == len(found) or not shared):
            return replace(frame, line=guards[-1].condition)
        if shared or found:
            return None
    return None


def blame_guarded(parts: Sequence[TimelineEntry], states: States, flows: Flows) -> Blame | None:
    """Return which of two ranks makes a conditional call that the other never made, or None if that is not clear."""
    # If the other's call is in the other branch of that condition, each of them makes a call that the other never made.
    if len(parts) != 2:
        return None
    found: dict[int, Frame] = {}
    for part, other in (parts, parts[::-1]):
        rank, peer = states[part.rank].rank, states[other.rank].rank
        frames = call_frames(peer, other.site)
        guard = find_guard(flows, call_frames(rank, part.site), frames, over=False)
        if guard is None or has_called(peer, part.kind):
            continue
        lines = [frame.line for frame in frames if _same_function(frame, guard)]
        branches = [statement for flow in flows if flow.file == guard.file for statement in flow.statements]
        at = [branch for branch in branches if branch.kind == "if" and branch.line == guard.line]
        if any(any(map(branch.holds, lines)) for branch in at):
            return None
        found[part.rank] = guard
    if len(found) != 1:
        return None
    ((blamed, guard),) = found.items()
    reason = f"its call is under the condition at line {guard.line}, and the other rank never made that call"
    return Blame(ranks=(blamed,), confidence=Confidence.MEDIUM, reason=reason)


def call_frames(rank: Rank, site: Frame | None) -> tuple[Frame, ...]:
    """Return the stack of a rank's call; only its line if it has moved on: calls on a device do not block."""
    stack = stack_of(rank)
    inside = site is None or any((frame.file, frame.line) == (site.file, site.line) for frame in stack)
    return stack if inside or site is None else (site,)


def has_called(rank: Rank, wanted: CallKind) -> bool:
    return any(line_key(kind) == line_key(wanted) for kind in rank.recent_calls.kinds)


def find_lone_call(states: States, positions: Positions, left: Sequence[int], flows: Flows) -> Conflict | None:
    """Return the call that only the waiting ranks make, if the ranks in ``left`` had passed its line."""
    # A rank that leaves a loop too early is a different case: the others then wait in a call that all ranks made
    # before.
    for group in dict.fromkeys(position.group for position in positions.values()):
        callers = [states[n] for n in group.members if n in positions and positions[n].group == group]
        gone = [states[n].rank for n in group.members if n in set(left)]
        if not callers or len(callers) > len(gone) or len(callers) + len(gone) != len(group.members):
            continue
        blame = _blame(callers, gone, flows)
        found = [_first_lone(state, group, gone) for state in callers] if blame is not None else []
        calls = [call for call in found if call is not None]
        if blame is not None and len(calls) == len(callers):
            parts, ranks = tuple(part for _, part in calls), tuple(rank.rank for rank in gone)
            seq = min(number for number, _ in calls)
            return Conflict(group=group, seq=seq, parts=parts, blame=blame, passed=False, left=ranks)
    return None


def _first_lone(state: RankState, group: Group, gone: Sequence[Rank]) -> tuple[int, TimelineEntry] | None:
    # The rank waits in the last one. Earlier ones may have returned: the root of a broadcast does not wait.
    entries = read_timeline(state, group.name, most=MOST_RECORDS).entries
    known = {line_key(kind) for rank in gone for kind in rank.recent_calls.counts}
    come = max(recorded_seq(rank, group.name) for rank in gone)
    first: tuple[int, TimelineEntry] | None = None
    lone = set()
    for number in sorted(entries, reverse=True):
        entry = entries[number]
        if number <= come or line_key(entry.kind) in known:
            break
        first = (number, entry)
        lone.add(entry.place)
    if first is None:
        return None
    # The rank may have called this line before, when all ranks still took part.
    log = state.rank.recent_calls
    line = line_key(first[1].kind)
    same = {at for at, kind in enumerate(log.kinds) if line_key(kind) == line}
    made = any(index not in lone for which, index in zip(log.which, log.indexes, strict=True) if which in same)
    return None if made else first


def _blame(callers: Sequence[RankState], gone: Sequence[Rank], flows: Flows) -> Blame | None:
    """Blame the callers if each rank that left got further in the script or bypassed a condition."""
    # If no source was read, it is enough that each of them destroyed the group.
    ranks = tuple(state.rank.rank for state in callers)
    stacks = [call_frames(state.rank, state.call.site if state.call is not None else None) for state in callers]
    if all(
        any(
            frame.user and _same_function(frame, line) and line.line > frame.line
            for frame in frames
            for line in _last_lines(rank)
        )
        for rank in gone
        for frames in stacks
    ):
        reason = "the other ranks passed that line without calling it"
        return Blame(ranks=ranks, confidence=Confidence.HIGH, reason=reason)
    guards = [find_guard(flows, frames, _last_lines(rank), over=True) for rank in gone for frames in stacks]
    if guards and guards[0] is not None and None not in guards:
        reason = f"it is under the condition at line {guards[0].line}, which is false on the other ranks"
        return Blame(ranks=ranks, confidence=Confidence.HIGH, reason=reason)
    made = ({kind.op for kind in rank.recent_calls.counts} for rank in gone)
    if all("destroy_process_group" in ops for ops in made):
        reason = "the other ranks destroyed the group without calling it, and no rank had called it before"
        return Blame(ranks=ranks, confidence=Confidence.MEDIUM, reason=reason)
    return None


def _last_lines(rank: Rank) -> list[Frame]:
    last = rank.recent_calls.last_of_kinds(lambda kind: kind.site is not None)
    return [frame for frame in (rank.exit_call, last.site if last is not None else None) if frame is not None]
