"""How far this host's clocks are from those of the host that serves the room.

Cristian's algorithm: the hub's clock is read within a round trip, and is taken for what it showed in the middle of it.
The error is at most half of the round trip, so the shortest of several counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.exchange.asking import Times, read_times

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.exchange.asking import Room

ROUNDS = 8
"""Ours: enough that one of them meets neither a queue on the way nor a busy hub."""
ENOUGH_NS = 2_000_000_000
"""Ours: over a slow way (a shared folder) fewer rounds do, rather than to keep everybody waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """This host's clocks less those of the host that serves."""

    wall_s: float
    monotonic_ns: int
    error_ns: int
    """Half of the shortest round trip: the offsets are right within this."""


def measure_clocks(room: Room, read: Callable[[], Times] = read_times) -> ClockOffset:
    """Return the offset by the shortest of some round trips; raises ``StoreError``."""
    began = read().monotonic_ns
    best: ClockOffset | None = None
    for _ in range(ROUNDS):
        offset, ended = _measure_once(room, read)
        if best is None or offset.error_ns < best.error_ns:
            best = offset
        if ended - began > ENOUGH_NS:
            break
    assert best is not None
    return best


def _measure_once(room: Room, read: Callable[[], Times]) -> tuple[ClockOffset, int]:
    before = read()
    theirs = room.now()
    after = read()
    half_ns = (after.monotonic_ns - before.monotonic_ns) // 2
    # The wall clock may be set meanwhile, so the middle is taken from the one that never is.
    offset = ClockOffset(
        wall_s=(before.wall_ns + half_ns - theirs.wall_ns) / 1e9,
        monotonic_ns=before.monotonic_ns + half_ns - theirs.monotonic_ns,
        error_ns=half_ns + 1,
    )
    return offset, after.monotonic_ns
