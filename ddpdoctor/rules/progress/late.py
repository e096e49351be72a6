"""Ranks that came to a call only after others had waited in it until torch's own time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.answers import Problem

from . import evidence as say
from .busy import busy_fix
from .limits import limit_words, limits_of, long_words
from .places import places
from .watchdog import NEARLY
from .words import call_words, line_of, place_words

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame

    from .failures import Failure
    from .groups import Position
    from .scene import Scene

TOGETHER_NS = 1_000_000_000
"""Our choice: longest gap between the last sample before a call and the start of the call."""


def find_late(scene: Scene) -> tuple[int, ...]:
    """Return the ranks that came to a collective after another had given up waiting for them there."""
    limits = limits_of(scene) if scene.failures else {}
    gave_up: dict[Position, int] = {}
    for failure in scene.failures:
        position = scene.positions.get(failure.rank.rank)
        given_up_ns = _gave_up_ns(failure, limits.get(failure.rank.rank))
        if position is not None and given_up_ns is not None:
            gave_up[position] = min(given_up_ns, gave_up.get(position, given_up_ns))
    calls = ((n, scene.states[n].call, gave_up.get(position)) for n, position in scene.positions.items())
    return tuple(sorted(n for n, call, since in calls if call is not None and since and call.started_ns >= since))


def _gave_up_ns(failure: Failure, limit_s: float | None) -> int | None:
    """Return when a rank failed in a call because torch's own time limit had passed, or None if it did not.

    The script may have handled the error for a while before the error ended the rank.
    """
    if failure.call is None or failure.error is None or limit_s is None:
        return None
    ended_ns = failure.call.ended_ns or failure.time_ns
    return ended_ns if ended_ns - failure.call.started_ns >= NEARLY * limit_s * 1e9 else None


def lines_before(scene: Scene, number: int) -> tuple[Frame, ...]:
    """Return the user's lines where a rank was sampled before its pending call, the most frequent first."""
    call, seen = scene.states[number].call, scene.rank(number).before_call
    if call is None or seen is None:
        return ()
    at_once = call.ended_ns is not None and call.ended_ns - call.started_ns <= TOGETHER_NS
    fits = abs(seen.until_ns - call.started_ns) <= TOGETHER_NS if seen.until_ns else at_once
    return seen.lines if fits else ()


def tell_late(scene: Scene, late: tuple[int, ...]) -> Problem:
    """Return the finding: where the late ranks were meanwhile, and how long the others had waited."""
    frames = {n: lines_before(scene, n) or (say.line_at(scene.states[n]),) for n in late}
    where = tuple(place for n in late for place in places(n, frames[n]))
    waiters = [failure for failure in scene.failures if failure.rank.rank not in late]
    first = waiters[0]
    limit_s = limits_of(scene).get(first.rank.rank)
    gone = f"after {long_words(limit_s)}" if limit_s is not None else "after torch's own time limit"
    who = rank_list(failure.rank.rank for failure in waiters)
    known = lines_before(scene, late[0])
    was = f"; until then it was {place_words(known[0])}" if known and len(late) == 1 else ""
    op = first.call.op if first.call is not None else "the call"
    calls = [(n, scene.states[n].call) for n in late]
    return Problem(
        confidence=Confidence.HIGH if known else Confidence.MEDIUM,
        ranks=late,
        hosts=say.hosts_of(scene, late),
        where=where,
        step=say.step_of(scene, late),
        summary=f"{say.who(scene, late)} came to {op} when {who} had given up waiting there {gone}{was}",
        evidence=(
            *(
                f"rank {n} called {call_words(call)} at {line_of(call.site)}, "
                f"{(call.started_ns - first.call.started_ns) / 1e9:.1f} s after rank {first.rank.rank}"
                for n, call in calls
                if call is not None and first.call is not None
            ),
            *limit_words(scene),
            *say.cascade_words(scene.failures, late),
        ),
        fix=busy_fix(scene),
    )
