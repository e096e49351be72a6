"""Which lines of the user's file decide whether a call is reached: conditions around it, jumps before it, its loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import JUMPS, LOOPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import ControlFlow, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """One way to go around a call."""

    condition: int
    """The line of the condition, the handler or the loop."""
    jump: int | None = None
    """The line of the `continue`, `break` or `return` under it."""
    ends_loop: bool = False
    """The loop came to its end."""
    skips_round: bool = False
    """The jump is a `continue`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a rank did around a call that it left out, as lines of the call's function; None if it was elsewhere."""

    left_out: int
    before: int | None
    """Its last line before the call was due."""
    failed: bool
    """What it did there raised an exception."""
    after: int | None
    """Its line now."""
    returned: bool = False
    """The rank has come back from the call's function, or has not called it: no loop in it goes on."""


def left_loop(flow: ControlFlow, route: Route) -> Statement | None:
    """Return the loop around the call that the rank is no longer in."""
    loop = loop_around(flow, route.left_out)
    is_out = route.returned or (route.after is not None and loop is not None and not loop.holds(route.after))
    return loop if is_out else None


def loop_around(flow: ControlFlow, line: int) -> Statement | None:
    """Return the innermost loop around a line, in its function."""
    return _innermost(_around(flow, line), line, LOOPS)


def find_detours(flow: ControlFlow, route: Route) -> tuple[Detour, ...]:
    """Return the ways around a call that a rank may have taken, in the order of their lines."""
    near = _around(flow, route.left_out)
    before = route.before if route.before is not None and any(one.holds(route.before) for one in near) else None
    loop = left_loop(flow, route)
    if loop is not None and route.returned:
        rounds = [one for one in near if one.kind == "continue" and loop.line < one.line < route.left_out]
        guards = [one for one in _guards(near, route.left_out, before, None) if loop.line < one.condition]
        return (*_by_jump(near, rounds), *guards, *_out_of(near, loop))
    if loop is not None:
        return _out_of(near, loop)
    if route.failed and before is not None:
        return _by_handler(near, before)
    start = _start(near, route.left_out, before)
    jumps = [one for one in near if one.kind in JUMPS and start < one.line < route.left_out]
    passing = [one for one in jumps if one.kind == "return" or _same_loop(near, one.line, route.left_out)]
    guards = _guards(near, route.left_out, before, route.after)
    return (*_by_jump(near, passing), *guards)


def _guards(near: Sequence[Statement], left_out: int, before: int | None, after: int | None) -> list[Detour]:
    """Return the conditions around a call, without those that the rank passed: it is, or was, in the same branch."""
    return [
        Detour(condition=one.line)
        for one in near
        if one.kind == "if"
        and one.holds(left_out)
        and not (before is not None and one.holds(before))
        and not (after is not None and one.holds_both(left_out, after))
    ]


def _out_of(near: Sequence[Statement], loop: Statement) -> tuple[Detour, ...]:
    """Return the ways out of a loop; if a fixed loop has no jump out, return the ways to skip a round."""
    inside = [one for one in near if one.kind in JUMPS and loop.holds(one.line)]
    own = [one for one in inside if one.kind == "return" or _innermost(near, one.line, LOOPS) == loop]
    leaving = [one for one in own if one.kind != "continue"]
    if loop.kind != "fixed-for":
        return (*_by_jump(near, leaving), Detour(condition=loop.line, ends_loop=True))
    return _by_jump(near, leaving or own)


def _around(flow: ControlFlow, line: int) -> tuple[Statement, ...]:
    """Return the statements of the function that contains a line, without those of nested functions."""
    own = _innermost(flow.statements, line, {"function"})
    found = []
    passed = 0
    for one in flow.statements:
        outside = own is not None and not own.line <= one.line <= own.last_line
        if outside or one.line <= passed:
            continue
        if one.kind == "function" and one != own and not one.holds(line):
            passed = one.last_line
        else:
            found.append(one)
    return tuple(found)


def _innermost(statements: Iterable[Statement], line: int, kinds: Iterable[str]) -> Statement | None:
    holding = [one for one in statements if one.kind in set(kinds) and one.holds(line)]
    return min(holding, key=lambda one: (one.last_line - one.line, -one.line), default=None)


def _start(near: Sequence[Statement], left_out: int, before: int | None) -> int:
    """Return the line after which a jump leads around the call: the last known, else the head of its loop."""
    loop = _innermost(near, left_out, LOOPS)
    if before is not None and before < left_out and (loop is None or loop.holds(before)):
        return before
    return loop.line if loop is not None else 0


def _same_loop(near: Sequence[Statement], jump: int, left_out: int) -> bool:
    loop = _innermost(near, jump, LOOPS)
    return loop is not None and loop.holds(left_out)


def _by_jump(near: Sequence[Statement], jumps: Iterable[Statement]) -> tuple[Detour, ...]:
    """Return each jump with its condition; leave out jumps without a condition, because all ranks take them."""
    pairs = ((_innermost(near, jump.line, {"if", "except"}), jump) for jump in jumps)
    return tuple(
        Detour(condition=head.line, jump=jump.line, skips_round=jump.kind == "continue")
        for head, jump in pairs
        if head is not None
    )


def _by_handler(near: Sequence[Statement], before: int) -> tuple[Detour, ...]:
    """Return the handlers of the exception that was raised at a line."""
    attempt = _innermost(near, before, {"try"})
    if attempt is None:
        return ()
    handlers = [one for one in near if one.kind == "except" and attempt.holds(one.line)]
    first = min((one.line for one in handlers), default=0)
    if before >= first:
        return ()
    jumps = [one.line for one in near if one.kind in JUMPS]
    return tuple(Detour(condition=one.line, jump=next(filter(one.holds, jumps), None)) for one in handlers)
