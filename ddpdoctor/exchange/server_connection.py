"""One connection of a server: the peer proves the token first, then sends requests, which are read within limits."""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING

from ddpdoctor.exchange.protocol import (
    HELLO,
    LENGTH,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    BadRequest,
    RequestType,
    parse_request,
    prove,
)

if TYPE_CHECKING:
    import socket

    from typing_extensions import Self

    from ddpdoctor.exchange.requests import RequestHandler

PROOF_LIMIT_S = 10.0
"""Our choice: the time that a new connection has to prove the token."""
REQUEST_LIMIT_S = 20.0
"""Our choice: the time in which a started request must arrive, and an answer must be read."""
_READ_BYTES = 256 * 1024


class WrongToken(BadRequest):
    """The peer does not hold this job's token."""


class ConnectionState:
    """The state of a connection. It is dropped at ``deadline``, which is None while nothing is pending."""

    def __init__(self, connection: socket.socket, token: bytes, now_s: float) -> None:
        """Prepare the greeting with its challenge."""
        self.connection = connection
        self.proven = False
        self.deadline: float | None = now_s + PROOF_LIMIT_S
        self.member: str | None = None
        """The member that beats over this connection."""
        self._token = token
        self._nonce = os.urandom(NONCE_BYTES)
        self._inbox = bytearray()
        self._outbox = bytearray(HELLO + self._nonce)

    @classmethod
    def own(cls, connection: socket.socket, now_s: float) -> Self:
        """Return a peer for a connection from this process, which needs no proof."""
        peer = cls(connection, b"", now_s)
        peer.proven, peer.deadline = True, None
        peer._outbox.clear()
        return peer

    @property
    def has_to_send(self) -> bool:
        """Whether an answer is not fully sent. Until it is, no further request is read."""
        return bool(self._outbox)

    def send(self, now_s: float) -> None:
        """Send as much as the connection accepts now."""
        sent = self.connection.send(self._outbox)
        del self._outbox[:sent]
        self._set_deadline(now_s, moved=sent > 0 and not self._outbox)

    def receive(self, handler: RequestHandler, now_s: float) -> bool:
        """Read what has arrived and answer it; return False at end of stream. Raises ``BadRequest``."""
        data = self.connection.recv(_READ_BYTES)
        self._inbox += data
        answered = False
        while not self._outbox and self._answer_next(handler):
            answered = True
        self._set_deadline(now_s, moved=answered)
        return bool(data)

    def _answer_next(self, handler: RequestHandler) -> bool:
        if not self.proven:
            return self._take_proof()
        request = self._take_request()
        if request is None:
            return False
        operation, key, value = parse_request(request)
        if operation in {RequestType.BEAT, RequestType.LEAVE}:
            self.member = key
        self._outbox += handler.answer(operation, key, value)
        return True

    def _take_proof(self) -> bool:
        if len(self._inbox) < NONCE_BYTES + PROOF_BYTES:
            return False
        client_nonce = bytes(self._inbox[:NONCE_BYTES])
        proof = bytes(self._inbox[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES])
        if not hmac.compare_digest(proof, prove(self._token, b"client", self._nonce, client_nonce)):
            raise WrongToken("it does not have this job's token")
        del self._inbox[: NONCE_BYTES + PROOF_BYTES]
        self.proven = True
        self._outbox += prove(self._token, b"server", self._nonce, client_nonce)
        return True

    def _take_request(self) -> bytes | None:
        if len(self._inbox) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._inbox)
        if length > MAX_REQUEST_BYTES:
            raise BadRequest("a request over the limit")
        if len(self._inbox) < LENGTH.size + length:
            return None
        request = bytes(self._inbox[LENGTH.size : LENGTH.size + length])
        del self._inbox[: LENGTH.size + length]
        return request

    def _set_deadline(self, now_s: float, *, moved: bool) -> None:
        """Extend the deadline only when a request or answer is complete, so that a trickle of bytes does not count."""
        if not self.proven:
            return
        if not self._inbox and not self._outbox:
            self.deadline = None
        elif moved or self.deadline is None:
            self.deadline = now_s + REQUEST_LIMIT_S
