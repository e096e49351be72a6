"""Carries messages through a store that somebody else serves: torch's own, if only the job's port gets through.

Only few keys are used, because the store belongs to the job. A client takes the next ticket and writes its message to
one of ``SLOTS`` keys; the server reads the tickets in order. So it polls one key, however many clients there are.
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
"""Each client has one request in flight. With fewer clients than this, no unread message is overwritten."""
LATE_S = 2.0
"""Our choice: the time that a client has between its ticket and its message. After it the server skips the ticket."""
LARGE_BYTES = 4096
"""Larger messages are removed from the job's store once they are read."""
_TICKET = struct.Struct("!Q")


class StoreOutbox:
    """The client's end; implements ``forwarding.Outbox``."""

    def __init__(self, store: Store) -> None:
        """Take ownership of the store."""
        self._store = store

    def meeting(self) -> bytes | None:
        """Return the ID of the meeting that the store announces, or None if it announces none."""
        meeting = self._store.get("meeting")
        return meeting if meeting is not None and len(meeting) == MEETING_BYTES else None

    def post(self, line: bytes, message: bytes) -> None:  # noqa: ARG002 - the message itself says its line
        """Write a message to the slot of the next ticket."""
        ticket = self._store.add("tickets", 1)
        self._store.set(_slot(ticket), _TICKET.pack(ticket) + message)

    def answer(self, line: bytes) -> bytes | None:
        """Return the last answer to a line, or None if there is none."""
        answer = self._store.get(_place(line))
        if answer is not None and len(answer) > LARGE_BYTES:
            self._store.set(_place(line), b"")
        return answer or None

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class StoreInbox:
    """The server's end; implements ``forwarding.Inbox``."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """Take ownership of the store."""
        self._store, self._clock = store, clock
        self._next = 1
        self._waited_since: float | None = None

    def open(self, meeting: bytes) -> None:
        """Announce this meeting, and answer from the next ticket on."""
        self._next = self._store.add("tickets", 0) + 1
        self._store.set("meeting", meeting)

    def messages(self) -> Iterator[bytes]:
        """Yield the messages that arrived since the last call."""
        while (sealed := self._take_next()) is not None:
            yield sealed

    def reply(self, line: bytes, message: bytes) -> None:
        """Write the answer to a line."""
        self._store.set(_place(line), message)

    def close(self) -> None:
        """Withdraw the announcement and close the store."""
        self._store.set("meeting", b"")
        self._store.close()

    def _take_next(self) -> bytes | None:
        """Return the next ticket's message, b"" if its client never wrote one, or None if there is nothing to read."""
        found = self._store.get(_slot(self._next))
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
