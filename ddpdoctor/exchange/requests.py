"""Handles the server's requests: values and counters, the clocks, and heartbeats."""

from __future__ import annotations

from ddpdoctor.exchange.client import read_times
from ddpdoctor.exchange.heartbeats import Heartbeats
from ddpdoctor.exchange.protocol import MAX_VALUE_BYTES, TIMES, BadRequest, RequestType, Status, pack_answer

MAX_KEYS = 65_536
MAX_DIGITS = 20
MAX_TOTAL_BYTES = 512 * 2**20
"""Our choice: enough for 8,192 processes, and no more memory than a rank's host can spare."""


class RequestHandler:
    """Handles all requests. Not thread-safe: only the server's thread uses it."""

    def __init__(self) -> None:
        """Start empty."""
        self.heartbeats = Heartbeats()
        self._values: dict[str, bytes] = {}
        self._total_bytes = 0

    def answer(self, operation: RequestType, key: str, value: bytes) -> bytes:
        """Return the packed answer to a request."""
        try:
            found = self._answer(operation, key, value)
        except BadRequest as bad:
            return pack_answer(Status.REFUSED, str(bad).encode())
        return pack_answer(Status.NOTHING) if found is None else pack_answer(Status.DONE, found)

    def _answer(self, operation: RequestType, key: str, value: bytes) -> bytes | None:
        if operation is RequestType.LOOK:
            return self._values.get(key)
        if operation is RequestType.ADD:
            return b"%d" % self._add(key, value)
        if operation is RequestType.NOW:
            return TIMES.pack(*read_times())
        if operation is RequestType.BEAT:
            return self.heartbeats.beat(key, value)
        if operation is RequestType.LEAVE:
            self.heartbeats.leave(key, value)
        elif operation is RequestType.SET:
            self._keep(key, value)
        else:
            self._total_bytes -= len(self._values.pop(key, b""))
        return b""

    def _add(self, key: str, amount: bytes) -> int:
        try:
            total = int(self._values.get(key, b"0")) + int(amount if len(amount) <= MAX_DIGITS else b"")
        except ValueError:
            raise BadRequest("only whole numbers can be added") from None
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
