"""A key-value store in memory, and the interface of all stores of the exchange.

The processes of a job exchange everything through a store: this process's own (``KeyValues``), one that another process
serves (``wire``), one behind a mailbox (``mailbox``), or torch's (``job_store``).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")
# With 1,024 waiting ranks, a store answers 4,000 requests a second: little for any of them.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.25
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 4 * 2**20 + 4096  # the limit of a packed message with its header and signature
MAX_KEYS = 65_536
MAX_DIGITS = 20
MAX_TOTAL_BYTES = 512 * 2**20  # our choice: enough for 8,192 processes, and no more memory than a rank's host can spare
MAX_MEMBERS = 8192
# Our choice: with both and the headers of four segments (4 * 66 bytes), one beat a second takes under 700 bytes/s.
MAX_SAID_BYTES, MAX_NOTICE_BYTES = 128, 256
BEAT_EVERY_S = 1.0  # our choice: a member counts as silent after 10 s, so a few beats may be late or lost


class StoreError(Exception):
    """A store cannot be reached, refuses or does not answer: a phrase with what was tried and the result."""


class Store(Protocol):
    """Every call has its own time limit and raises ``StoreError`` if it fails. Threads may share a store."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""

    def forget(self, key: str) -> None: ...
    def close(self) -> None:
        """Disconnect; a second call does nothing."""


class Client(Store, Protocol):
    """ddpdoctor's own store, which also provides the time and receives heartbeats."""

    beat_every_s: float  # seconds between two beats of a member

    def now(self) -> ClockTimes:
        """Return the clocks of the store's host, read at some time during this call."""

    def beat(self, member: str, said: bytes = b"") -> bytes:
        """Send a heartbeat with a few bytes; return the notice that is shown to all members."""

    def leave(self, member: str, word: bytes = b"") -> None:
        """Report that a member ends, so that its silence raises no alarm."""


class ClockTimes(NamedTuple):
    """The time on one host's clocks, in nanoseconds."""

    wall_ns: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a store knows about one member. Times are CLOCK_MONOTONIC on the store's host."""

    heard_ns: int
    said: bytes = b""
    left: bytes | None = None  # its last message if it has left, else None
    # When its connection ended before it left; None if that never happened, or if it has beaten again since.
    broken_ns: int | None = None


class KeyValues:
    """Values, counters and heartbeats, for the threads of this process and its clients."""

    beat_every_s = BEAT_EVERY_S

    def __init__(self) -> None:
        self.notice = b""
        """The answer to every beat."""
        self.ended = False
        self.own_keys: tuple[str, ...] = ()
        """The prefix of keys that only this process writes: it decides, and the others read."""
        self._values: dict[str, bytes] = {}
        self._total_bytes = 0
        self._heard: dict[str, Heard] = {}
        self._lock = threading.RLock()

    def set(self, key: str, value: bytes) -> None:
        with self._open():
            grown = self._total_bytes + len(value) - len(self._values.get(key, b""))
            if len(value) > MAX_VALUE_BYTES or grown > MAX_TOTAL_BYTES:
                raise StoreError("the value is over the limit")
            if key not in self._values and len(self._values) >= MAX_KEYS:
                raise StoreError("there are too many keys")
            self._values[key], self._total_bytes = value, grown

    def get(self, key: str) -> bytes | None:
        with self._open():
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._open():
            before = self._values.get(key, b"0")
            if not is_whole(before):
                raise StoreError("only whole numbers can be added")
            if amount:
                self.set(key, b"%d" % (int(before) + amount))
            return int(before) + amount

    def forget(self, key: str) -> None:
        with self._open():
            self._total_bytes -= len(self._values.pop(key, b""))

    def close(self) -> None:
        """Do nothing: a store in the same process needs no connection."""

    def now(self) -> ClockTimes:
        return read_times()

    def beat(self, member: str, said: bytes = b"") -> bytes:
        self._hear(member, said, said, None)
        return self.notice

    def leave(self, member: str, word: bytes = b"") -> None:
        known = self._heard.get(member)
        self._hear(member, word, known.said if known else b"", word)

    def lose(self, member: str) -> None:
        """Record that the connection over which a member beats has ended."""
        with self._lock:
            heard = self._heard.get(member)
            if heard is not None and heard.left is None:
                self._heard[member] = replace(heard, broken_ns=time.monotonic_ns())

    def heard(self) -> dict[str, Heard]:
        with self._lock:
            return dict(self._heard)

    def _hear(self, member: str, sent: bytes, said: bytes, left: bytes | None) -> None:
        with self._open():
            if len(sent) > MAX_SAID_BYTES or (member not in self._heard and len(self._heard) >= MAX_MEMBERS):
                raise StoreError("the heartbeat is over the limit")
            self._heard[member] = Heard(heard_ns=time.monotonic_ns(), said=said, left=left)

    def _open(self) -> threading.RLock:
        if self.ended:
            raise StoreError("it has stopped serving")
        return self._lock


def is_whole(text: bytes) -> bool:
    """Return whether a text is a whole number short enough to be converted: megabytes of digits take minutes."""
    return len(text) <= MAX_DIGITS and text.removeprefix(b"-").isdigit()


def read_times() -> ClockTimes:
    return ClockTimes(time.time_ns(), time.monotonic_ns())


def wait_for(poll: Callable[[], Found | None], limit_s: float) -> Found | None:
    """Poll until something is found, and return it, or None at the time limit. Ctrl-C ends the wait immediately."""
    deadline = time.monotonic() + limit_s
    pause_s = FIRST_PAUSE_S
    while (found := poll()) is None and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
    return found


def wait_until(is_over: Callable[[], bool], limit_s: float, pause_s: float) -> bool:
    """Poll until something is over; return False at the time limit."""
    deadline = time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
    return True
