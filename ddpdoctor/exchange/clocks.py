"""How far this host's clocks are from those of another one.

A server of ours says what its clocks show (``measure_clocks``). This is Cristian's algorithm: the answer is taken for
the middle of the round trip, and is wrong by half of it at most, so the shortest of several round trips counts.

A store of torch has no clock. There rank 0 leaves its time under one key ten times a second (``ShownClock``), and a
reader looks again and again (``measure_offset``). Each new value is at most one pause and one trip old: the smallest
difference of several is the offset, and is too large by no more than that. A few hundredths of a second do no harm.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.exchange.client import Times, read_times
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.exchange.client import Client
    from ddpdoctor.exchange.conversation import Conversation

ROUNDS = 8
"""Ours: enough that one of them meets neither a queue on the way nor a busy server."""
ENOUGH_NS = 2_000_000_000
"""Ours: over a slow way (a shared folder) fewer rounds do, rather than to keep everybody waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """This host's clocks less those of the host that serves."""

    wall_s: float
    monotonic_ns: int
    error_ns: int
    """Half of the shortest round trip: the offsets are right within this."""


def measure_clocks(client: Client, read: Callable[[], Times] = read_times) -> ClockOffset:
    """Return the offset by the shortest of some round trips; raises ``StoreError``."""
    began = read().monotonic_ns
    best: ClockOffset | None = None
    for _ in range(ROUNDS):
        offset, ended = _measure_once(client, read)
        if best is None or offset.error_ns < best.error_ns:
            best = offset
        if ended - began > ENOUGH_NS:
            break
    assert best is not None
    return best


def _measure_once(client: Client, read: Callable[[], Times]) -> tuple[ClockOffset, int]:
    before = read()
    theirs = client.now()
    after = read()
    half_ns = (after.monotonic_ns - before.monotonic_ns) // 2
    # The wall clock may be set meanwhile, so the middle is taken from the one that never is.
    offset = ClockOffset(
        wall_s=(before.wall_ns + half_ns - theirs.wall_ns) / 1e9,
        monotonic_ns=before.monotonic_ns + half_ns - theirs.monotonic_ns,
        error_ns=half_ns + 1,
    )
    return offset, after.monotonic_ns


KEY = "clock"
SHOW_EVERY_S = 0.1
LOOK_EVERY_S = 0.02
ENOUGH_VALUES = 5
"""The first may be old, and a busy rank 0 may be late with one or another."""
OFFSET_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _WallClock:
    """In seconds since 1970."""

    now_s: float


class ShownClock:
    """A context in which this process shows its wall clock."""

    def __init__(self, conversation: Conversation) -> None:
        """Take where it is shown."""
        self._conversation = conversation
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="ddpdoctor-clock", daemon=True)

    def __enter__(self) -> None:
        """Start."""
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join(timeout=1)

    def _show(self) -> None:
        while not self._ended.is_set():
            try:
                self._conversation.send(KEY, _WallClock(now_s=time.time()))
            except StoreError:
                return
            self._ended.wait(SHOW_EVERY_S)


def measure_offset(conversation: Conversation, now: Callable[[], float] = time.time) -> float | None:
    """Return how far this clock is ahead of rank 0's, in seconds; None where rank 0's is not shown."""
    deadline = time.monotonic() + OFFSET_LIMIT_S
    differences: list[float] = []
    former: _WallClock | None = None
    while len(differences) < ENOUGH_VALUES and time.monotonic() < deadline:
        shown = conversation.look(_WallClock, KEY, "rank 0's clock")
        seen_s = now()
        # The first value is of unknown age.
        if shown is not None and former is not None and shown != former:
            differences.append(seen_s - shown.now_s)
        former = shown or former
        time.sleep(LOOK_EVERY_S)
    return min(differences, default=None)
