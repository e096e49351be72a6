"""Ranks that came to a call only after others had waited in it for as long as torch lets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limits import limits_of
from .watchdog import NEARLY

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame

    from .failures import Failure
    from .groups import Position
    from .scene import Scene

TOGETHER_NS = 1_000_000_000
"""Ours: a call begins this soon after the last look at what came before it."""


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
    """Return when a rank failed in a call since torch's own time limit for it had passed; None where it did not.

    The script may have handled the error for a while before it let it end the rank.
    """
    if failure.call is None or failure.error is None or limit_s is None:
        return None
    ended_ns = failure.call.ended_ns or failure.time_ns
    return ended_ns if ended_ns - failure.call.started_ns >= NEARLY * limit_s * 1e9 else None


def lines_before(scene: Scene, number: int) -> tuple[Frame, ...]:
    """Return the user's lines at which a rank was met before it came to its pending call, the most frequent first."""
    call, seen = scene.states[number].call, scene.rank(number).before_call
    if call is None or seen is None:
        return ()
    at_once = call.ended_ns is not None and call.ended_ns - call.started_ns <= TOGETHER_NS
    fits = abs(seen.until_ns - call.started_ns) <= TOGETHER_NS if seen.until_ns else at_once
    return seen.lines if fits else ()
