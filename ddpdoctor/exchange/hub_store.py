"""A client of the hub."""

from __future__ import annotations

import hmac
import os
import threading
from typing import TYPE_CHECKING

from ddpdoctor.exchange.asking import CALL_LIMIT_S, Room
from ddpdoctor.exchange.hub_wire import (
    HELLO,
    LENGTH,
    MAX_VALUE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    prove,
)
from ddpdoctor.exchange.reach import Refused, describe, reach, receive
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from ddpdoctor.exchange.reach import Failures


class HubStore(Room):
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


def open_hub_store(
    hosts: Sequence[str],
    port: int,
    token: bytes,
    limit_s: float,
    *,
    served_by: str = "rank 0",
    seen: Failures | None = None,
) -> HubStore:
    """Connect to a hub, which may be yet to start; raises ``StoreError`` with what was tried and seen, as ``reach``."""
    return HubStore(reach(hosts, port, limit_s, lambda connection: _greet(connection, token), seen), served_by)


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
