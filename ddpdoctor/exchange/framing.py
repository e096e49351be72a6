"""The format of a message: a header, compressed JSON, and a signature if the job has a token.

Received data is untrusted: its size is limited before and after decompression, and nothing is unpickled or run.

Layout: "DDPD", format version (1 byte), signed (1 byte), length of the payload (4 bytes, big-endian), payload, and in a
signed message HMAC-SHA256 over everything before it. The version increases when an older reader would misread a
message; a new field does not require that (see ``codec``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import zlib
from typing import Any

MAGIC = b"DDPD"
VERSION = 1
MAX_PACKED_BYTES = 4 * 2**20
"""Our choice: the facts of a node with 8 GPUs take about 10 KiB; torch's store takes values up to 8 MiB."""
MAX_PLAIN_BYTES = 32 * 2**20
"""Our choice: the largest size of an unpacked message."""
_HEADER = struct.Struct("!4sBBI")
_SIGNATURE_BYTES = 32


class BadMessage(Exception):  # noqa: N818 - says what it is
    """Received data is not a message, or must not be read. The text is a phrase that follows "sent"."""


def pack(plain: Any, token: bytes | None = None) -> bytes:
    """Pack a JSON value into a message; raises ``BadMessage`` if it is larger than a reader accepts."""
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
    payload = zlib.compress(text, 6)
    if len(text) > MAX_PLAIN_BYTES or len(payload) > MAX_PACKED_BYTES:
        raise BadMessage(f"a message of {len(text)} bytes, which is over the limit")
    message = _HEADER.pack(MAGIC, VERSION, token is not None, len(payload)) + payload
    return message if token is None else message + _sign(message, token)


def unpack(message: bytes, token: bytes | None = None) -> Any:
    """Check a message and return its JSON value; raises ``BadMessage``."""
    if len(message) < _HEADER.size or not message.startswith(MAGIC):
        raise BadMessage("something that is not a message of ddpdoctor")
    _, version, signed, length = _HEADER.unpack_from(message)
    if version != VERSION:
        raise BadMessage(f"a message of format {version}; this version of ddpdoctor reads format {VERSION}")
    if length > MAX_PACKED_BYTES or len(message) != _HEADER.size + length + _SIGNATURE_BYTES * bool(signed):
        raise BadMessage(f"a message of {len(message)} bytes, which is cut short or over the limit")
    _check_signature(message, signed=bool(signed), token=token)
    return _parse(decompress(message[_HEADER.size : _HEADER.size + length], MAX_PLAIN_BYTES))


def _sign(message: bytes, token: bytes) -> bytes:
    return hmac.new(token, message, hashlib.sha256).digest()


def _check_signature(message: bytes, *, signed: bool, token: bytes | None) -> None:
    if token is None:
        if signed:
            raise BadMessage("a signed message, but this process has no DDPDOCTOR_TOKEN")
        return
    if not signed:
        raise BadMessage("a message that is not signed with this job's token")
    body, signature = message[:-_SIGNATURE_BYTES], message[-_SIGNATURE_BYTES:]
    if not hmac.compare_digest(_sign(body, token), signature):
        raise BadMessage("a message signed with another token")


def decompress(payload: bytes, most_bytes: int) -> bytes:
    """Undo zlib.compress; raises ``BadMessage`` if the payload is damaged or unpacks to more than ``most_bytes``."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(payload, most_bytes)
    except zlib.error as error:
        raise BadMessage(f"a damaged message ({error})") from None
    if unpacker.unconsumed_tail:
        raise BadMessage(f"a message that unpacks to more than {most_bytes} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise BadMessage("a damaged message (its end is not where it should be)")
    return text


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a damaged message ({type(error).__name__} in its JSON)") from None


def _refuse(name: str) -> Any:
    raise ValueError(name)
