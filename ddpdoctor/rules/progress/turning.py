"""Where the rank to blame left the path of the others: the line that decided it, and how to say so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls

from ddpdoctor.rules.progress.detours import Detour, Route, find_detours, left_loop, loop_around
from ddpdoctor.rules.progress.parting import Parting, find_parting
from ddpdoctor.rules.progress.states import NATIVE_PHASES, stack_of
from ddpdoctor.rules.progress.timeline import line_key
from ddpdoctor.rules.progress.words import line_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import CallKind, ControlFlow, Statement
    from ddpdoctor.model.stacks import Frame

    from ddpdoctor.rules.progress.states import RankState
    from ddpdoctor.rules.progress.timeline import TimelineEntry

    Parts = tuple[TimelineEntry | None, TimelineEntry | None]

MOST_WAYS = 4
"""Most ways around a call that are listed."""
ALIKE = "look for a collective under a condition that differs between ranks, or for loops of unequal length"
"""What to do where the line that decided it is not known."""
NO_LINE = 0
"""Stands for the line of a rank whose script has ended: it is in no loop."""
AT_THE_END = 1 << 62
"""Used instead of an unknown number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """How the rank to blame parted from the others."""

    parting: Parting
    detours: tuple[Detour, ...]
    """The ways in its code around what it left out; empty if its source is not known."""
    loop: Statement | None
    """The loop that it left while the others went on in it."""
    call: Frame
    """The line that was left out, in the function of those ways."""

    @property
    def lines(self) -> tuple[Frame, ...]:
        """The lines that decided it if there is only one way, else the last line before it."""
        if self.detours and (len(self.detours) == 1 or self.loop is not None):
            detour = self.detours[0]
            second = detour.jump if detour.jump is not None or self.loop is not None else self.call.line
            return tuple(replace(self.call, line=line) for line in (detour.condition, second) if line is not None)
        site = self._turned_at()
        return (site,) if site is not None else ()

    @property
    def loop_ended(self) -> bool:
        """Whether the rank left a loop at its end."""
        skips = any(one.skips_round for one in self.detours)
        return self.loop is not None and not skips and any(one.ends_loop for one in self.detours)

    @property
    def reduced_nothing(self) -> bool:
        """Whether the rank made the call that was due, but DDP did not reduce in it."""
        went_on, due = self.parting.went_on, self.parting.instead_of
        return went_on is not None and due.op == "backward" and (went_on.op, went_on.site) == (due.op, due.site)

    def _turned_at(self) -> Frame | None:
        if self.parting.is_extra and self.parting.went_on is not None:
            return self.parting.went_on.site
        if self.reduced_nothing:
            return self.parting.instead_of.site
        return self.parting.before.site if self.parting.before is not None else None


def find_turning(
    flows: Iterable[ControlFlow], mine: RankState, other: RankState, group: str, seq: int, parts: Parts
) -> Turning | None:
    """Return how a rank that is to blame parted from another, or None if only the call itself is known.

    ``parts`` are their calls under the number ``seq``; None for a rank that has ended.
    """
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
    if parting.is_extra:
        return Turning(parting=parting, detours=(), loop=None, call=parting.instead_of.site)
    after = parting.went_on.site if parting.is_earlier and parting.went_on is not None else None
    found = _look_up(tuple(flows), parting, (mine, other), parts, after)
    if parting.is_earlier or found.loop is not None or own is None:
        return found
    if found.detours and _is_in(usual, parting.instead_of):
        return found
    once_more = _once_more(tuple(flows), parting) if parting.repeats else None
    if usual is None or usual.site is None or _is_in(usual, parting.instead_of):
        return once_more
    # The others are past the first call that it left out, and their stacks show the way to the next.
    found = _look_up(tuple(flows), replace(parting, instead_of=usual.kind), (mine, other), parts, after)
    return found if found.loop is not None else once_more


def _once_more(flows: Iterable[ControlFlow], parting: Parting) -> Turning | None:
    """Return what is known of a rank that repeats a call: the loop around it, if that may be longer on one rank."""
    site = parting.went_on.site if parting.went_on is not None else None
    if site is None:
        return None
    loop = next((loop_around(flow, site.line) for flow in flows if flow.file == site.file), None)
    may_differ = loop is not None and loop.kind != "fixed-for"
    return Turning(parting=replace(parting, is_extra=True), detours=(), loop=loop if may_differ else None, call=site)


def _went_past(mine: RankState, other: RankState, usual: TimelineEntry) -> bool:
    """Return whether a rank is below the line at which another is, and never made the call that the other is in."""
    made = {line_key(kind) for kind in pack_calls(mine.rank.recent_calls).counts}
    if usual.native or line_key(usual.kind) in made:
        return False
    ours, theirs = ([frame for frame in stack_of(state.rank) if frame.user] for state in (mine, other))
    for one, two in zip(ours, theirs, strict=False):
        if not _same_function(one, two):
            return False
        if one.line != two.line:
            return one.line > two.line
    return False


def _look_up(
    flows: Sequence[ControlFlow],
    parting: Parting,
    states: tuple[RankState, RankState],
    parts: Parts,
    after: Frame | None,
) -> Turning:
    """Look for ways around the call in its own function; if there are none, in the functions that called it."""
    mine, other = states
    now = stack_of(mine.rank) or tuple(
        part.kind.site for part in parts[:1] if part is not None and part.kind.site is not None
    )
    own = (after,) if after is not None else now
    over = parts[0] is None and not parting.is_earlier
    calls = _callers(parting.instead_of, other, parts[1])
    before = parting.before.site if parting.before is not None else None
    was_there = before is not None and _same_function(before, calls[0])
    for depth, call in enumerate(calls):
        flow = next((flow for flow in flows if flow.file == call.file), None)
        if flow is None:
            continue
        at = NO_LINE if over else next((frame.line for frame in own if _same_function(frame, call)), None)
        outer = calls[depth + 1 :] or [frame for frame in stack_of(other.rank) if not _same_function(frame, call)]
        # It has been there, as its last common act shows, and is at another line of a function further out now.
        has_left = was_there and any(
            _same_function(frame, one) and frame.line != one.line for frame in own for one in outer
        )
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
            and (was_inside or any(_same_function(frame, one) for frame in now for one in outer)),
        )
        found = find_detours(flow, route)
        if found:
            return Turning(parting=parting, detours=found, loop=left_loop(flow, route), call=call)
    return Turning(parting=parting, detours=(), loop=None, call=calls[0])


def _callers(due: CallKind, other: RankState, part: TimelineEntry | None) -> list[Frame]:
    """Return the line of the call that was due, and if a rank is still in it, the lines that led there."""
    site = due.site
    if site is None:
        return []
    inside = _is_in(part, due)
    outer = [frame for frame in reversed(stack_of(other.rank)) if frame.user and frame != site] if inside else []
    return [site, *outer]


def _is_in(part: TimelineEntry | None, due: CallKind) -> bool:
    return part is not None and (part.kind.op, part.kind.site) == (due.op, due.site)


def _same_function(one: Frame, other: Frame) -> bool:
    return (one.file, one.function) == (other.file, other.function)


def did_words(turning: Turning) -> str:
    """Return what a rank did that the others did not, such as "skipped backward (train.py:15)"."""
    parting = turning.parting
    due = f"{parting.instead_of.op} ({line_of(parting.instead_of.site)})"
    if parting.is_extra and parting.went_on is not None:
        return f"called {parting.went_on.op} ({line_of(parting.went_on.site)}) once more than the others"
    if turning.reduced_nothing:
        return f"did not reduce in {due}"
    if turning.loop is not None and turning.detours and not any(detour.skips_round for detour in turning.detours):
        return f"left the loop ({line_of(replace(turning.call, line=turning.loop.line))}) before the others"
    return f"skipped {due}"


def turning_words(turning: Turning, who: str) -> list[str]:
    """Return how a rank parted from the others, as a sentence."""
    before = turning.parting.before
    after = f" after {before.op} ({line_of(before.site)})" if before is not None else ""
    ways = [_detour_words(detour) for detour in turning.detours[:MOST_WAYS]]
    decides = f"; the cause is {' or '.join(ways)}" if ways else ""
    return [f"{who} {did_words(turning)}{after}{decides}"]


def fix_of_turning(turning: Turning) -> str:
    """Return what to do about it."""
    loop = turning.loop
    if turning.parting.is_extra and loop is not None:
        return (
            f"let all ranks go through the loop at line {loop.line} equally often; if they do, look for a call of that "
            "line under a condition that differs between ranks"
        )
    if turning.parting.is_extra:
        return ALIKE
    if loop is not None and turning.parting.instead_of.op not in NATIVE_PHASES and loop.kind == "for":
        return (
            f"make all ranks go through the loop at line {loop.line} equally often and skip nothing in it: reduce the "
            "same names on every rank, with a zero where a rank has none, or put them into one tensor"
        )
    if loop is not None and loop.kind == "while":
        return (
            f"all_reduce the decision to leave the loop at line {loop.line}, so that all ranks leave it in the same "
            "iteration: a clock or a loss differs between ranks"
        )
    if loop is not None:
        return (
            "give every rank the same number of batches (DistributedSampler, drop_last=True), or use model.join(); if "
            "a rank decides to break or skip, all_reduce that decision"
        )
    if turning.reduced_nothing:
        return "use no_sync() in the same steps on all ranks: count the micro-batches the same way"
    return "skip it on all ranks or on none: all_reduce the condition, or multiply the unwanted loss by zero"


def _detour_words(detour: Detour) -> str:
    if detour.ends_loop:
        return f"the end of the loop at line {detour.condition}"
    jump = f" (jump at line {detour.jump})" if detour.jump not in (None, detour.condition) else ""
    return f"the condition at line {detour.condition}{jump}"
