"""How far this host's wall clock is from rank 0's.

Rank 0 leaves its time under one key ten times a second. A reader looks again and again, and each time it finds another
value, that is at most one pause and one trip old: the smallest difference of several is the offset, and is too large by
no more than that. A few hundredths of a second are far below what any job minds.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ddpdoctor.exchange.facts import Tick
from ddpdoctor.exchange.framing import BadMessage
from ddpdoctor.exchange.store import Store, StoreError
from ddpdoctor.model.codec import WrongValue, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.exchange.meeting import Meeting

KEY = "clock"
EVERY_S = 0.1
LOOK_EVERY_S = 0.02
ENOUGH = 5
"""Values seen new: the first may be old, and a busy rank 0 may be late with one or another."""
LIMIT_S = 3.0


class Ticker:
    """A context in which rank 0's clock is shown."""

    def __init__(self, meeting: Meeting, store: Store) -> None:
        """Take the meeting for its messages, and the store."""
        self._meeting, self._store = meeting, store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ddpdoctor-ticker", daemon=True)

    def __enter__(self) -> None:
        """Start."""
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join(timeout=1)

    def _tick(self) -> None:
        while not self._ended.is_set():
            try:
                self._store.set(KEY, self._meeting.pack(encode(Tick(now_s=time.time()))))
            except StoreError:
                return
            self._ended.wait(EVERY_S)


def measure_offset(meeting: Meeting, store: Store, now: Callable[[], float] = time.time) -> float | None:
    """Return how far this clock is ahead of rank 0's, in seconds; None where rank 0's is not shown."""
    deadline = time.monotonic() + LIMIT_S
    differences: list[float] = []
    former: bytes | None = None
    while len(differences) < ENOUGH and time.monotonic() < deadline:
        value = store.look(KEY)
        seen_s = now()
        # The first value is of unknown age.
        if value is not None and former is not None and value != former:
            differences.append(seen_s - _read(meeting, value))
        former = value if value is not None else former
        time.sleep(LOOK_EVERY_S)
    return min(differences, default=None)


def _read(meeting: Meeting, value: bytes) -> float:
    try:
        return decode(Tick, meeting.unpack(value)).now_s
    except (BadMessage, WrongValue) as error:
        raise StoreError(f"rank 0's clock sent {error}") from error
