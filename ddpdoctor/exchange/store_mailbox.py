"""Messages by way of a store that somebody else serves: torch's own, where no port but the job's gets through.

Keys are few, for the store is the job's: a client takes the next ticket and leaves its message in one of ``SLOTS``
places by it; the server goes through the tickets. So it asks one question at a time, however many clients there are.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from ddpdoctor.exchange.forwarding import MEETING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpdoctor.exchange.store import Store

SLOTS = 4096
"""A client has one request under way: with fewer clients than this no message is overwritten before it is read."""
LATE_S = 2.0
"""Ours: how long a client may take between its ticket and its message; the next ticket's turn comes then."""
LARGE_BYTES = 4096
"""What is larger is taken out of the job's store once it is read."""
_TICKET = struct.Struct("!Q")


class StoreOutbox:
    """A client's end."""

    def __init__(self, store: Store) -> None:
        """Own the store."""
        self._store = store

    def meeting(self) -> bytes | None:
        """Return the meeting that is served, as far as can be seen."""
        meeting = self._store.look("room")
        return meeting if meeting is not None and len(meeting) == MEETING_BYTES else None

    def post(self, line: bytes, message: bytes) -> None:  # noqa: ARG002 - the message itself says its line
        """Leave a message."""
        ticket = self._store.add("tickets", 1)
        self._store.set(_slot(ticket), _TICKET.pack(ticket) + message)

    def answer(self, line: bytes) -> bytes | None:
        """Return the last answer that was left for a line."""
        answer = self._store.look(_place(line))
        if answer is not None and len(answer) > LARGE_BYTES:
            self._store.set(_place(line), b"")
        return answer or None

    def close(self) -> None:
        """Leave."""
        self._store.close()


class StoreInbox:
    """The server's end."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """Own the store."""
        self._store, self._clock = store, clock
        self._next = 1
        self._waited_since: float | None = None

    def open(self, meeting: bytes) -> None:
        """Say that this meeting is served, from the next ticket on."""
        self._next = self._store.add("tickets", 0) + 1
        self._store.set("room", meeting)

    def messages(self) -> Iterator[bytes]:
        """Return what has come since."""
        while (sealed := self._take_next()) is not None:
            yield sealed

    def reply(self, line: bytes, message: bytes) -> None:
        """Leave an answer for a line."""
        self._store.set(_place(line), message)

    def close(self) -> None:
        """Say that nothing is served any more, and leave."""
        self._store.set("room", b"")
        self._store.close()

    def _take_next(self) -> bytes | None:
        """Return the next ticket's message; empty for a ticket without one, None where there is no further ticket."""
        found = self._store.look(_slot(self._next))
        if found is not None and found.startswith(_TICKET.pack(self._next)):
            if len(found) > LARGE_BYTES:
                self._store.set(_slot(self._next), b"")
            self._step()
            return found[_TICKET.size :]
        if self._store.add("tickets", 0) < self._next:
            self._waited_since = None
            return None
        if self._waited_since is None:
            self._waited_since = self._clock()
        if self._clock() < self._waited_since + LATE_S:
            return None
        self._step()
        return b""

    def _step(self) -> None:
        self._next += 1
        self._waited_since = None


def _slot(ticket: int) -> str:
    return f"slot/{ticket % SLOTS}"


def _place(line: bytes) -> str:
    return f"line/{line.hex()}"
