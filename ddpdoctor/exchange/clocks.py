"""Measures the offset between this host's clocks and another host's.

ddpdoctor's own server answers with its clocks (``measure_clocks``). This is Cristian's algorithm: it assumes that the
server read its clocks in the middle of the round trip. The error is at most half of the round trip, so the shortest of
several round trips counts.

A torch store has no clock. There rank 0 writes its time to one key ten times a second (``shown_clock``), and a reader
polls that key (``measure_offset``). Each new value is at most one pause and one trip old. So the smallest of several
differences is the offset, and it is too large by no more than that. An error of a few hundredths of a second is fine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.exchange.store import ClockTimes, StoreError, read_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.exchange.store import Client

ROUNDS = 8  # our choice: with this many, at least one round trip meets neither a network queue nor a busy server
# Our choice: over a slow transport (a shared folder) fewer rounds are enough, so that nobody waits long.
ENOUGH_NS = 2_000_000_000
KEY, SHOW_EVERY_S, LOOK_EVERY_S = "clock", 0.1, 0.02
ENOUGH_VALUES = 5  # the first value may be old, and a busy rank 0 may write some of them late
# Our choice: five values come in half a second, but with thirteen processes per core no two came in 3 s.
OFFSET_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """This host's clocks minus those of the server's host."""

    wall_s: float
    monotonic_ns: int
    error_ns: int  # half of the shortest round trip: the largest possible error of the offsets


def measure_clocks(client: Client, read: Callable[[], ClockTimes] = read_times) -> ClockOffset:
    """Return the offset measured in the shortest of several round trips; raises ``StoreError``."""
    offsets: list[ClockOffset] = []
    began_ns = read().monotonic_ns
    for _ in range(ROUNDS):
        before, theirs, after = read(), client.now(), read()
        # Somebody may set the wall clock during the call, so the monotonic clock gives the middle.
        half_ns = (after.monotonic_ns - before.monotonic_ns) // 2
        offsets.append(
            ClockOffset(
                wall_s=(before.wall_ns + half_ns - theirs.wall_ns) / 1e9,
                monotonic_ns=before.monotonic_ns + half_ns - theirs.monotonic_ns,
                error_ns=half_ns + 1,
            )
        )
        if after.monotonic_ns - began_ns > ENOUGH_NS:
            break
    return min(offsets, key=lambda one: one.error_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WallClock:
    """Rank 0's wall clock, in seconds since 1970."""

    now_s: float


@contextlib.contextmanager
def shown_clock(conversation: Conversation) -> Iterator[None]:
    """Publish this process's wall clock while the context is open."""
    ended = threading.Event()

    def show() -> None:
        with contextlib.suppress(StoreError):
            while not ended.is_set():
                conversation.send(KEY, _WallClock(now_s=time.time()))
                ended.wait(SHOW_EVERY_S)

    thread = threading.Thread(target=show, name="ddpdoctor-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)


def measure_offset(conversation: Conversation) -> float | None:
    """Return how many seconds this clock is ahead of rank 0's, or None if rank 0 does not publish its clock."""
    deadline = time.monotonic() + OFFSET_LIMIT_S
    differences: list[float] = []
    former: _WallClock | None = None
    while len(differences) < ENOUGH_VALUES and time.monotonic() < deadline:
        shown = conversation.get(_WallClock, KEY, "rank 0's clock")
        seen_s = time.time()
        # The age of the first value is unknown.
        if shown is not None and former is not None and shown != former:
            differences.append(seen_s - shown.now_s)
        former = shown or former
        time.sleep(LOOK_EVERY_S)
    return min(differences, default=None)
