"""The protocol between the server and its clients, and how each side proves that it holds the job's token.

First the server sends ``HELLO`` and 32 random bytes. The client sends 32 random bytes and HMAC("client", both). The
server sends HMAC("server", both). Then requests and answers alternate. A request is the length of the rest (4 bytes,
big-endian), operation (1 byte), length of the key (2 bytes), key, value. An answer is the length of the rest (4 bytes),
status (1 byte), value.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum

HELLO = b"ddpdoctor server 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 4 * 2**20 + 4096
"""The limit of a packed message with its header and signature."""
MAX_REQUEST_BYTES = 3 + MAX_KEY_BYTES + MAX_VALUE_BYTES
LENGTH = struct.Struct("!I")
TIMES = struct.Struct("!qq")
"""The answer to NOW: wall clock and CLOCK_MONOTONIC, in nanoseconds."""
_REQUEST = struct.Struct("!BH")


class RequestType(IntEnum):
    """The request types."""

    SET = 1
    LOOK = 2
    ADD = 3
    NOW = 4
    """Read the server's clocks."""
    FORGET = 5
    BEAT = 6
    """The key is a member, the value a few bytes of its own; the answer is the notice to all members."""
    LEAVE = 7
    """The key is a member, the value its last message."""


class Status(IntEnum):
    """How a request ended."""

    DONE = 0
    NOTHING = 1
    """The key has no value yet."""
    REFUSED = 2
    """The answer's value is the reason."""


class BadRequest(Exception):  # noqa: N818 - says what it is
    """A request that ddpdoctor's client would never send. The text is a phrase."""


def prove(token: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the proof that one side holds the token. It is valid for this connection only."""
    return hmac.new(token, side + b"\0" + server_nonce + client_nonce, hashlib.sha256).digest()


def pack_request(operation: RequestType, key: str, value: bytes) -> bytes:
    """Pack a request with its length prefix."""
    name = key.encode()
    return LENGTH.pack(_REQUEST.size + len(name) + len(value)) + _REQUEST.pack(operation, len(name)) + name + value


def parse_request(rest: bytes) -> tuple[RequestType, str, bytes]:
    """Return the operation, key and value of a request; raises ``BadRequest``."""
    try:
        number, length = _REQUEST.unpack_from(rest)
        operation = RequestType(number)
        name = rest[_REQUEST.size : _REQUEST.size + length].decode()
    except (struct.error, ValueError):
        raise BadRequest("a malformed request") from None
    if not 0 < length <= MAX_KEY_BYTES or len(rest) < _REQUEST.size + length:
        raise BadRequest("a malformed request")
    return operation, name, rest[_REQUEST.size + length :]


def pack_answer(status: Status, value: bytes = b"") -> bytes:
    """Pack an answer with its length prefix."""
    return LENGTH.pack(1 + len(value)) + bytes([status]) + value
