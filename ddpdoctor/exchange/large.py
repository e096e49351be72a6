"""A value larger than a message may be, in parts.

The parts come first and what describes them last, so that whoever sees the description finds all of them. Their sum and
checksum are held against it: a sender that was cut off, or sent twice under one key, is seen.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from ddpdoctor.exchange.store import StoreError, wait_for

if TYPE_CHECKING:
    from ddpdoctor.exchange.asking import Room

PART_BYTES = 256 * 1024
"""Ours: at 1 Mbit/s a part takes 2 s, well within a call's limit, and other requests get their turn between parts."""
MAX_LARGE_BYTES = 64 * 2**20
"""Ours: what one value may be in all; a hub keeps up to 512 MiB of everybody's."""
_DESCRIPTION = struct.Struct("!Q32s")


def send_large(room: Room, key: str, data: bytes) -> None:
    """Leave a value of any size up to ``MAX_LARGE_BYTES``; raises ``StoreError``."""
    if len(data) > MAX_LARGE_BYTES:
        raise StoreError(f"{key} is {len(data)} bytes, which is over the limit of {MAX_LARGE_BYTES}")
    for number, start in enumerate(range(0, len(data), PART_BYTES)):
        room.set(f"{key}/{number}", data[start : start + PART_BYTES])
    room.set(key, _DESCRIPTION.pack(len(data), hashlib.sha256(data).digest()))


def receive_large(room: Room, key: str, limit_s: float) -> bytes | None:
    """Return a value once it is there and take it from the room; None where it does not come within the limit.

    Raises ``StoreError`` for one that is damaged or over the limit.
    """
    description = wait_for(room, key, limit_s)
    if description is None:
        return None
    size, digest = _read(key, description)
    names = [f"{key}/{number}" for number in range(-(-size // PART_BYTES))]
    data = b"".join(_look_at_part(room, name) for name in names)
    for name in (key, *names):
        room.forget(name)
    if len(data) != size or hashlib.sha256(data).digest() != digest:
        raise StoreError(f"{key} arrived damaged")
    return data


def _read(key: str, description: bytes) -> tuple[int, bytes]:
    if len(description) != _DESCRIPTION.size:
        raise StoreError(f"{key} is not described as a value in parts is")
    size, digest = _DESCRIPTION.unpack(description)
    if size > MAX_LARGE_BYTES:
        raise StoreError(f"{key} is said to be {size} bytes, which is over the limit of {MAX_LARGE_BYTES}")
    return size, digest


def _look_at_part(room: Room, name: str) -> bytes:
    part = room.look(name)
    if part is None or len(part) > PART_BYTES:
        raise StoreError(f"{name} is missing or over the limit")
    return part
