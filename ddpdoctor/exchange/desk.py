"""What a hub does with a request: values and counters, the time, and who is there."""

from __future__ import annotations

from ddpdoctor.exchange.asking import read_times
from ddpdoctor.exchange.hub_wire import TIMES, BadRequest, Operation, Status, pack_answer
from ddpdoctor.exchange.presence import Presences
from ddpdoctor.exchange.values import Values


class Desk:
    """Answers requests. Not safe between threads: the hub's only thread has it."""

    def __init__(self) -> None:
        """Start empty."""
        self.presences = Presences()
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
