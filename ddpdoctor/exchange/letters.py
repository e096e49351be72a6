"""A request or an answer of a hub that goes another way than by the hub's own connections: sealed, and in order.

Such a way (a store that others serve, a shared folder) is open to whoever reaches it. So every letter carries
HMAC-SHA256 by the job's token over the side that wrote it, the room (random, of one life of a hub), the line (random,
of one client), its number on that line, and what it says: it can neither be forged nor used again. What it says is not
hidden. Without a token the trust is that of the way itself.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.exchange.framing import BadMessage
from ddpdoctor.exchange.hub_wire import MAX_REQUEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM_BYTES = 16
LINE_BYTES = 16
_HEADER = struct.Struct(f"!{LINE_BYTES}sQ32s")
MAX_LETTER_BYTES = _HEADER.size + MAX_REQUEST_BYTES


class Side(Enum):
    """Who wrote a letter."""

    CLIENT = b"client"
    SERVER = b"server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A request, or the answer of the same number."""

    line: bytes
    number: int
    text: bytes


class Outbox(Protocol):
    """The client's end of a way; every call raises ``StoreError`` where it fails."""

    def room(self) -> bytes | None:
        """Return the room that is served, as far as can be seen; it may have ended."""

    def post(self, line: bytes, letter: bytes) -> None:
        """Leave a letter; the former one of this line need not be kept."""

    def answer(self, line: bytes) -> bytes | None:
        """Return the last answer that was left for a line."""

    def close(self) -> None:
        """Take away what this line has left, and leave."""


class Inbox(Protocol):
    """The server's end of a way; every call raises ``StoreError`` where it fails."""

    def open(self, room: bytes) -> None:
        """Say that this room is served; what was left for a former one is of no use."""

    def letters(self) -> Iterator[bytes]:
        """Return what has come since, if anything; nothing is waited for."""

    def reply(self, line: bytes, letter: bytes) -> None:
        """Leave an answer for a line."""

    def close(self) -> None:
        """Take away what was left here, and leave."""


def seal(letter: Letter, side: Side, room: bytes, token: bytes) -> bytes:
    """Return a letter as it travels."""
    return _HEADER.pack(letter.line, letter.number, _sign(letter, side, room, token)) + letter.text


def unseal(message: bytes, side: Side, room: bytes, token: bytes) -> Letter:
    """Return the letter that one side of a room wrote; raises ``BadMessage`` for any other."""
    if not _HEADER.size < len(message) <= MAX_LETTER_BYTES:
        raise BadMessage("a letter that is cut short or over the limit")
    line, number, signature = _HEADER.unpack_from(message)
    letter = Letter(line=line, number=number, text=message[_HEADER.size :])
    if not hmac.compare_digest(signature, _sign(letter, side, room, token)):
        raise BadMessage("a letter of another room, or by another token")
    return letter


def _sign(letter: Letter, side: Side, room: bytes, token: bytes) -> bytes:
    head = b"ddpdoctor letter\0" + side.value + room + _HEADER.pack(letter.line, letter.number, b"")
    return hmac.new(token, head + letter.text, hashlib.sha256).digest()
