"""The key-value store through which the processes of a job exchange values, whoever serves it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")
FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.25
"""With 1,024 waiting ranks, a store answers 4,000 requests a second: little for either implementation."""


class StoreError(Exception):
    """A store cannot be reached or does not answer: a phrase that says what was tried and what was seen."""


class Store(Protocol):
    """A client's view of a store.

    Every call has its own time limit and raises ``StoreError`` if it fails. Threads may share a store.
    """

    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key."""

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it has none yet."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""

    def forget(self, key: str) -> None:
        """Remove a value."""

    def close(self) -> None:
        """Disconnect; a second call does nothing."""


def wait_for(poll: Callable[[], Found | None], limit_s: float) -> Found | None:
    """Poll until something is found, and return it, or None if it is not in time. Ctrl-C ends the wait at once."""
    deadline = time.monotonic() + limit_s
    pause_s = FIRST_PAUSE_S
    while (found := poll()) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
    return found


def wait_until(is_over: Callable[[], bool], limit_s: float, pause_s: float) -> bool:
    """Look again and again until something is over; return False if it is not in time."""
    deadline = time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
    return True


class LocalStore:
    """An in-memory store for the threads of one process."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key."""
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it has none yet."""
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
            return total

    def forget(self, key: str) -> None:
        """Remove a value."""
        self._values.pop(key, None)

    def close(self) -> None:
        """Do nothing, because there is no connection."""
