"""What every client of a hub can ask, however its requests get there."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import NamedTuple

from ddpdoctor.exchange.hub_wire import LENGTH, MAX_KEY_BYTES, MAX_VALUE_BYTES, TIMES, Operation, Status, pack_request
from ddpdoctor.exchange.store import StoreError

CALL_LIMIT_S = 10.0
"""Ours. A hub answers in microseconds; its host may be busy with its own reading."""
BEAT_EVERY_S = 1.0
"""Ours: a judgement waits for 10 s of silence, so that some beats may be late or lost."""


class Times(NamedTuple):
    """What the clocks of the hub's host show, in nanoseconds."""

    wall_ns: int
    """Since 1970."""
    monotonic_ns: int
    """CLOCK_MONOTONIC."""


class Room(ABC):
    """A ``Store``, and what only a hub does. Every call has a limit and raises ``StoreError``; threads may share it."""

    beat_every_s = BEAT_EVERY_S
    """How often a member may beat, so that all its beats take less than 1 KiB/s on their way."""

    def __init__(self, served_by: str) -> None:
        """Take what the messages call who serves: "rank 0", "the first node"."""
        self._served_by = served_by

    def set(self, key: str, value: bytes) -> None:
        """Leave a value."""
        self._call(Operation.SET, key, value)

    def look(self, key: str) -> bytes | None:
        """Return a value, or None where there is none yet."""
        return self._call(Operation.LOOK, key, b"")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""
        answer = self._call(Operation.ADD, key, b"%d" % amount)
        try:
            return int(answer or b"0")
        except ValueError:
            raise self._misled(key) from None

    def forget(self, key: str) -> None:
        """Take a value away, so that its room is free."""
        self._call(Operation.FORGET, key, b"")

    def now(self) -> Times:
        """Return what the hub's clocks show at some time within this call."""
        answer = self._call(Operation.NOW, "now", b"")
        if answer is None or len(answer) != TIMES.size:
            raise self._misled("now")
        return Times(*TIMES.unpack(answer))

    def beat(self, member: str, said: bytes = b"") -> bytes:
        """Be heard as a member, with a few bytes of one's own; return the notice that the hub shows to all members."""
        return self._call(Operation.BEAT, member, said) or b""

    def leave(self, member: str, word: bytes = b"") -> None:
        """Say that a member ends, so that its silence alarms nobody."""
        self._call(Operation.LEAVE, member, word)

    @abstractmethod
    def close(self) -> None:
        """Hang up; a second call does nothing."""

    @abstractmethod
    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, both without their length; raises ``StoreError``."""

    def _call(self, operation: Operation, key: str, value: bytes) -> bytes | None:
        if len(value) > MAX_VALUE_BYTES or len(key.encode()) > MAX_KEY_BYTES:
            raise StoreError(f"{key[:MAX_KEY_BYTES]} is over the limit of what a message may hold")
        answer = self.ask(pack_request(operation, key, value)[LENGTH.size :])
        if not answer:
            raise self._misled(key)
        status, rest = answer[0], answer[1:]
        if status == Status.REFUSED:
            raise StoreError(f"{self._served_by} refused {key}: {rest[:200].decode(errors='replace')}")
        return None if status == Status.NOTHING else rest

    def _misled(self, key: str) -> StoreError:
        return StoreError(f"{self._served_by} sent an answer to {key} that is none")


def read_times() -> Times:
    """Return what the clocks of this host show."""
    return Times(time.time_ns(), time.monotonic_ns())
