"""A client of the hub."""

from __future__ import annotations

import hmac
import os
import threading
from typing import TYPE_CHECKING

from ddpdoctor.exchange.hub_wire import (
    HELLO,
    LENGTH,
    MAX_VALUE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Operation,
    Status,
    pack_request,
    prove,
)
from ddpdoctor.exchange.reach import Refused, describe, reach
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

CALL_LIMIT_S = 10.0
"""Ours. The hub answers in microseconds; rank 0 may be busy with its own reading."""


class HubStore:
    """A connection that has proven itself."""

    def __init__(self, connection: socket.socket) -> None:
        """Own the connection."""
        connection.settimeout(CALL_LIMIT_S)
        self._connection = connection
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Leave a value."""
        self._call(Operation.SET, key, value)

    def look(self, key: str) -> bytes | None:
        """Return a value, or None where there is none yet."""
        return self._call(Operation.LOOK, key, b"")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        answer = self._call(Operation.ADD, key, b"%d" % amount)
        return int(answer or b"0")

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _call(self, operation: Operation, key: str, value: bytes) -> bytes | None:
        try:
            with self._lock:
                self._connection.sendall(pack_request(operation, key, value))
                answer = _receive_answer(self._connection)
        except OSError as error:
            # An answer that comes too late must not be taken for the next one's.
            self._connection.close()
            raise StoreError(f"the connection to rank 0 failed: {describe(error)}") from error
        status, rest = answer[0], answer[1:]
        if status == Status.REFUSED:
            raise StoreError(f"rank 0 refused {key}: {rest[:200].decode(errors='replace')}")
        return None if status == Status.NOTHING else rest


def open_hub_store(hosts: Sequence[str], port: int, token: bytes, limit_s: float) -> HubStore:
    """Connect to rank 0's hub, which may be yet to start; raises ``StoreError`` with what was tried and seen."""
    return HubStore(reach(hosts, port, limit_s, lambda connection: _greet(connection, token)))


def _greet(connection: socket.socket, token: bytes) -> socket.socket:
    """Prove the token to the server, and have it prove that it holds it too."""
    if _receive(connection, len(HELLO)) != HELLO:
        raise Refused("something answers that is not ddpdoctor")
    server_nonce = _receive(connection, NONCE_BYTES)
    client_nonce = os.urandom(NONCE_BYTES)
    connection.sendall(client_nonce + prove(token, b"client", server_nonce, client_nonce))
    try:
        proof = _receive(connection, PROOF_BYTES)
    except ConnectionError:
        proof = b""
    if not hmac.compare_digest(proof, prove(token, b"server", server_nonce, client_nonce)):
        raise Refused("ddpdoctor answers, and does not hold the same token (DDPDOCTOR_TOKEN)")
    return connection


def _receive_answer(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
    if not 0 < length <= 1 + MAX_VALUE_BYTES:
        raise ConnectionError("an answer over the limit")
    return _receive(connection, length)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the other side hung up")
        data += part
    return bytes(data)
