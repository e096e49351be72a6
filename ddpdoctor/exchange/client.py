"""Clients of ddpdoctor's server: the requests that every client can send, and a client over a TCP connection."""

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
    RequestType,
    Status,
    pack_request,
    prove,
)
from ddpdoctor.exchange.reach import WrongServer, describe, reach, receive
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from ddpdoctor.exchange.reach import Failures

CALL_LIMIT_S = 10.0
"""Our choice: a server answers in microseconds, but its host may be busy."""
BEAT_EVERY_S = 1.0
"""Our choice: a member counts as silent after 10 s, so a few beats may be late or lost."""


class ClockTimes(NamedTuple):
    """The time on one host's clocks, in nanoseconds."""

    wall_ns: int
    """Nanoseconds since 1970."""
    monotonic_ns: int
    """CLOCK_MONOTONIC."""


class Client(ABC):
    """A ``Store`` with the extra requests of ddpdoctor's server.

    Every call has a time limit and raises ``StoreError`` if it fails. Threads may share a client.
    """

    beat_every_s = BEAT_EVERY_S
    """Seconds between two beats of a member. At this pace they take less than 1 KiB/s of network traffic."""

    def __init__(self, served_by: str) -> None:
        """``served_by`` names the server in error messages: "rank 0", "the first node"."""
        self._served_by = served_by

    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key."""
        self._call(RequestType.SET, key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it has none yet."""
        return self._call(RequestType.LOOK, key, b"")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""
        answer = self._call(RequestType.ADD, key, b"%d" % amount)
        try:
            return int(answer or b"0")
        except ValueError:
            raise self._misled(key) from None

    def forget(self, key: str) -> None:
        """Remove a value, to free the server's memory."""
        self._call(RequestType.FORGET, key, b"")

    def now(self) -> ClockTimes:
        """Return the server's clocks, read at some time during this call."""
        answer = self._call(RequestType.NOW, "now", b"")
        if answer is None or len(answer) != TIMES.size:
            raise self._misled("now")
        return ClockTimes(*TIMES.unpack(answer))

    def beat(self, member: str, said: bytes = b"") -> bytes:
        """Send a member's heartbeat with a few bytes; return the notice that the server shows to all members."""
        return self._call(RequestType.BEAT, member, said) or b""

    def leave(self, member: str, word: bytes = b"") -> None:
        """Report that a member ends, so that its silence raises no alarm."""
        self._call(RequestType.LEAVE, member, word)

    @abstractmethod
    def close(self) -> None:
        """Close the connection; a second call does nothing."""

    @abstractmethod
    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, both without their length prefix; raises ``StoreError``."""

    def _call(self, operation: RequestType, key: str, value: bytes) -> bytes | None:
        if len(value) > MAX_VALUE_BYTES or len(key.encode()) > MAX_KEY_BYTES:
            raise StoreError(f"{key[:MAX_KEY_BYTES]} is over the limit for a message")
        answer = self.ask(pack_request(operation, key, value)[LENGTH.size :])
        if not answer:
            raise self._misled(key)
        status, rest = answer[0], answer[1:]
        if status == Status.REFUSED:
            raise StoreError(f"{self._served_by} refused {key}: {rest[:200].decode(errors='replace')}")
        return None if status == Status.NOTHING else rest

    def _misled(self, key: str) -> StoreError:
        return StoreError(f"{self._served_by} sent an invalid answer to {key}")


def read_times() -> ClockTimes:
    """Read the clocks of this host."""
    return ClockTimes(time.time_ns(), time.monotonic_ns())


class ServerClient(Client):
    """A client over a connection on which both sides have proven the token."""

    def __init__(self, connection: socket.socket, served_by: str = "rank 0") -> None:
        """Take ownership of the connection."""
        super().__init__(served_by)
        connection.settimeout(CALL_LIMIT_S)
        self._connection = connection
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, both without their length prefix."""
        try:
            with self._lock:
                self._connection.sendall(LENGTH.pack(len(request)) + request)
                return _receive_answer(self._connection)
        except OSError as error:
            # A late answer must not be mistaken for the answer to the next request.
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
    """Connect to a server that may still be starting; raises ``StoreError`` as ``reach`` does."""
    return ServerClient(reach(hosts, port, limit_s, lambda connection: _greet(connection, token), seen), served_by)


def _greet(connection: socket.socket, token: bytes) -> socket.socket:
    """Prove to the server that this process holds the token, and check that the server holds it too."""
    if receive(connection, len(HELLO)) != HELLO:
        raise WrongServer("another program answers, not ddpdoctor")
    server_nonce = receive(connection, NONCE_BYTES)
    client_nonce = os.urandom(NONCE_BYTES)
    connection.sendall(client_nonce + prove(token, b"client", server_nonce, client_nonce))
    try:
        proof = receive(connection, PROOF_BYTES)
    except ConnectionError:
        proof = b""
    if not hmac.compare_digest(proof, prove(token, b"server", server_nonce, client_nonce)):
        raise WrongServer("ddpdoctor answers, but has another token (DDPDOCTOR_TOKEN)")
    return connection


def _receive_answer(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
    if not 0 < length <= 1 + MAX_VALUE_BYTES:
        raise ConnectionError("an answer over the limit")
    return receive(connection, length)
