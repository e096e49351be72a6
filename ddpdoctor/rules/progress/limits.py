"""torch's own time limit for the calls that ranks wait in: how long it is, how much is left, whether it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .groups import native_group, own_state
from .scene import moment
from .states import NATIVE_PHASES, Doing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .scene import Scene
    from .states import State

GRACE_NS = 30_000_000_000
"""Our choice: how long torch gets after its limit to act by itself: to raise, or to let NCCL's watchdog write its
dump."""
_OWN_LIMITS = frozenset({"barrier", "monitored_barrier"})
"""Calls that may have a longer limit than their group; torch ends them by itself."""


def is_limit_over(scene: Scene) -> bool:
    """Return whether a rank has waited longer than torch's limit plus ``GRACE_NS``."""
    return any(_is_over(scene, number, limit_s) for number, limit_s in limits_of(scene).items())


def _is_over(scene: Scene, number: int, limit_s: float) -> bool:
    state = scene.states[number]
    waited_ns = state.since(moment(scene.job))
    if waited_ns is None or state.call is None or state.call.op in _OWN_LIMITS:
        return False
    return waited_ns >= limit_s * 1e9 + GRACE_NS


def limit_words(scene: Scene) -> list[str]:
    """Return torch's limit and how much of it is left, for the wait that ends first."""
    found = []
    for number, limit_s in limits_of(scene).items():
        state = scene.states[number]
        waited_ns = state.since(moment(scene.job))
        if waited_ns is not None and state.call is not None:
            found.append((limit_s - waited_ns / 1e9, limit_s, state.call.op))
    if not found:
        return []
    left_s, limit_s, op = min(found)
    left = f"{long_words(left_s)} of it are left" if left_s > 0 else "it has passed"
    told = [f"torch's own time limit for this wait in {op} is {long_words(limit_s)}; {left}"]
    if scene.job.hang_timeout_s >= limit_s:
        told.append(
            f"the hang timeout of {long_words(scene.job.hang_timeout_s)} is not below it, so that torch ends the job "
            f"before it is judged: use a --hang-timeout below {long_words(limit_s)}"
        )
    return told


def long_words(duration_s: float) -> str:
    """Return "30 min", "29 min 52 s", "45 s", "2 h"."""
    hours, rest = divmod(round(duration_s), 3600)
    minutes, seconds = divmod(rest, 60)
    parts = [f"{value} {unit}" for value, unit in ((hours, "h"), (minutes, "min"), (seconds, "s")) if value]
    return " ".join(parts[:2]) or "0 s"


def limits_of(scene: Scene) -> dict[int, float]:
    """Return the limits of the calls that ranks wait in; if a rank did not answer, use its peers' limit."""
    ranks = [state.rank for state in scene.states.values()]
    of_peers = {group.name: group.timeout_s for rank in reversed(ranks) for group in rank.groups if group.timeout_s}
    limits = {number: _limit_s(scene.states[number], of_peers) for number in scene.waits.waiters}
    return {number: limit_s for number, limit_s in limits.items() if limit_s is not None}


def _limit_s(state: State, of_peers: Mapping[str, float]) -> float | None:
    call = state.call
    if call is None or state.doing is Doing.NEW_GROUP:
        return None
    if state.doing is Doing.INIT:
        return state.rank.init_timeout_s
    name = native_group(state) if call.op in NATIVE_PHASES else call.group
    own = own_state(state.rank, name)
    return own.timeout_s if own is not None and own.timeout_s is not None else of_peers.get(name)
