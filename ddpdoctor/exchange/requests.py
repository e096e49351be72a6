"""Handles the server's requests: values and counters, the clocks, and heartbeats."""

from __future__ import annotations

from ddpdoctor.exchange.client import read_times
from ddpdoctor.exchange.heartbeats import Heartbeats
from ddpdoctor.exchange.protocol import MAX_VALUE_BYTES, TIMES, BadRequest, Operation, Status, pack_answer

MAX_KEYS = 65_536
MAX_DIGITS = 20
MAX_TOTAL_BYTES = 512 * 2**20
"""Our choice: enough for 8,192 processes, and no more memory than a rank's host can spare."""


class Values:
    """Handles requests for values and counters. Not thread-safe: only the server's thread uses it."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[str, bytes] = {}
        self._total_bytes = 0

    def answer(self, operation: Operation, key: str, value: bytes) -> bytes:
        """Return the packed answer to a request."""
        try:
            if operation is Operation.SET:
                self._keep(key, value)
                return pack_answer(Status.DONE)
            if operation is Operation.FORGET:
                self._total_bytes -= len(self._values.pop(key, b""))
                return pack_answer(Status.DONE)
            if operation is Operation.ADD:
                return pack_answer(Status.DONE, b"%d" % self._add(key, value))
        except BadRequest as bad:
            return pack_answer(Status.REFUSED, str(bad).encode())
        found = self._values.get(key)
        return pack_answer(Status.NOTHING) if found is None else pack_answer(Status.DONE, found)

    def _add(self, key: str, amount: bytes) -> int:
        try:
            total = int(self._values.get(key, b"0")) + int(amount if len(amount) <= MAX_DIGITS else b"")
        except ValueError:
            raise BadRequest("to add takes whole numbers") from None
        if amount != b"0":
            self._keep(key, b"%d" % total)
        return total

    def _keep(self, key: str, value: bytes) -> None:
        grown = self._total_bytes + len(value) - len(self._values.get(key, b""))
        if len(value) > MAX_VALUE_BYTES or grown > MAX_TOTAL_BYTES:
            raise BadRequest("the value is over the limit")
        if key not in self._values and len(self._values) >= MAX_KEYS:
            raise BadRequest("there are too many keys")
        self._values[key] = value
        self._total_bytes = grown


class RequestHandler:
    """Handles all requests. Not thread-safe: only the server's thread uses it."""

    def __init__(self) -> None:
        """Start empty."""
        self.presences = Heartbeats()
        self._values = Values()

    def answer(self, operation: Operation, key: str, value: bytes) -> bytes:
        """Return the packed answer to a request."""
        if operation is Operation.NOW:
            return pack_answer(Status.DONE, TIMES.pack(*read_times()))
        try:
            if operation is Operation.BEAT:
                return pack_answer(Status.DONE, self.presences.beat(key, value))
            if operation is Operation.LEAVE:
                self.presences.leave(key, value)
                return pack_answer(Status.DONE)
        except BadRequest as bad:
            return pack_answer(Status.REFUSED, str(bad).encode())
        return self._values.answer(operation, key, value)
