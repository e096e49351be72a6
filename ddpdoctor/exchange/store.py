"""Where processes of a job leave values for each other, whoever serves it."""

from __future__ import annotations

import time
from typing import Protocol

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.25
"""With 1,024 ranks that wait, a store answers 4,000 questions a second: little for either implementation."""


class StoreError(Exception):
    """A store cannot be reached or does not answer: a phrase that says what was tried and what was seen."""


class Store(Protocol):
    """A client's view of a store.

    Every call has a time limit of its own and raises ``StoreError`` where it fails. Threads may share a store.
    """

    def set(self, key: str, value: bytes) -> None:
        """Leave a value."""

    def look(self, key: str) -> bytes | None:
        """Return a value, or None where there is none yet."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""

    def close(self) -> None:
        """Leave; a second call does nothing."""


def wait_for(store: Store, key: str, limit_s: float) -> bytes | None:
    """Return a value once it is there; None where it does not come in time. A Ctrl-C ends it at once."""
    deadline = time.monotonic() + limit_s
    pause_s = FIRST_PAUSE_S
    while (value := store.look(key)) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
    return value


class Prefixed:
    """A store whose keys all begin alike."""

    def __init__(self, store: Store, prefix: str) -> None:
        """Take the store and what its keys are to begin with."""
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: bytes) -> None:
        """Leave a value."""
        self._store.set(self._prefix + key, value)

    def look(self, key: str) -> bytes | None:
        """Return a value, or None where there is none yet."""
        return self._store.look(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        return self._store.add(self._prefix + key, amount)

    def close(self) -> None:
        """Close the store."""
        self._store.close()
