"""A client of the server: what it can ask, however its requests get there, and the connection to the server's port."""

from __future__ import annotations

import hmac
import os
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.exchange.protocol import (
    HELLO,
    LENGTH,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    TIMES,
    Operation,
    Status,
    pack_request,
    prove,
)
from ddpdoctor.exchange.reach import Refused, describe, reach, receive
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from ddpdoctor.exchange.reach import Failures

CALL_LIMIT_S = 10.0
"""Ours. A server answers in microseconds; its host may be busy with its own reading."""
BEAT_EVERY_S = 1.0
"""Ours: a judgement waits for 10 s of silence, so that some beats may be late or lost."""


class Times(NamedTuple):
    """What the clocks of the server's host show, in nanoseconds."""

    wall_ns: int
    """Since 1970."""
    monotonic_ns: int
    """CLOCK_MONOTONIC."""


class Client(ABC):
    """A ``Store``, and what only a server of ours does. Calls have limits and raise ``StoreError``; threads share."""

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
        """Take a value away, to free its memory."""
        self._call(Operation.FORGET, key, b"")

    def now(self) -> Times:
        """Return what the server's clocks show at some time within this call."""
        answer = self._call(Operation.NOW, "now", b"")
        if answer is None or len(answer) != TIMES.size:
            raise self._misled("now")
        return Times(*TIMES.unpack(answer))

    def beat(self, member: str, said: bytes = b"") -> bytes:
        """Send a heartbeat of a member, with a few bytes; return the notice that the server shows to all members."""
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


class ServerClient(Client):
    """A connection that has proven itself."""

    def __init__(self, connection: socket.socket, served_by: str = "rank 0") -> None:
        """Own the connection."""
        super().__init__(served_by)
        connection.settimeout(CALL_LIMIT_S)
        self._connection = connection
        self._lock = threading.Lock()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, both without their length."""
        try:
            with self._lock:
                self._connection.sendall(LENGTH.pack(len(request)) + request)
                return _receive_answer(self._connection)
        except OSError as error:
            # An answer that comes too late must not be taken for the next one's.
            self._connection.close()
            raise StoreError(f"the connection to {self._served_by} failed: {describe(error)}") from error


def open_client(
    hosts: Sequence[str],
    port: int,
    token: bytes,
    limit_s: float,
    *,
    served_by: str = "rank 0",
    seen: Failures | None = None,
) -> ServerClient:
    """Connect to a server, which may be yet to start; raises ``StoreError`` as ``reach`` does."""
    return ServerClient(reach(hosts, port, limit_s, lambda connection: _greet(connection, token), seen), served_by)


def _greet(connection: socket.socket, token: bytes) -> socket.socket:
    """Prove the token to the server, and have it prove that it holds it too."""
    if receive(connection, len(HELLO)) != HELLO:
        raise Refused("something answers that is not ddpdoctor")
    server_nonce = receive(connection, NONCE_BYTES)
    client_nonce = os.urandom(NONCE_BYTES)
    connection.sendall(client_nonce + prove(token, b"client", server_nonce, client_nonce))
    try:
        proof = receive(connection, PROOF_BYTES)
    except ConnectionError:
        proof = b""
    if not hmac.compare_digest(proof, prove(token, b"server", server_nonce, client_nonce)):
        raise Refused("ddpdoctor answers, and does not hold the same token (DDPDOCTOR_TOKEN)")
    return connection


def _receive_answer(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
    if not 0 < length <= 1 + MAX_VALUE_BYTES:
        raise ConnectionError("an answer over the limit")
    return receive(connection, length)
