"""A rank's replica of a model at many points in time: layout, writer and reader of fingerprint files, version 1.

A rank has one file per stream. A stream is a set of tensors (``rows``) that are fingerprinted together at one kind of
event, its clock. When the set changes, as when an optimizer makes its state, a new file follows. It has three parts:

``header``
    identity, and how many records were begun.
``table``
    compressed JSON, written once: the description of the stream, and its rows.
``slots``
    records of one size; the oldest are overwritten. A record has a head, a JSON text, and 16 bytes per row, zeros if
    the rank has no such tensor. Its number is set to 0 before anything else changes, and written last.

All numbers are little-endian. Times are CLOCK_MONOTONIC in nanoseconds. A reader may come while its rank still writes.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import time
import zlib
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from .files import make_folder, open_plain, parse_json
from .ring_writing import allocate

MAGIC = b"DDPPRNT\n"
VERSION = 1
HEADER_SIZE = 128
# magic, version, rows, table size, slots offset and size of one, their count, pid, start ticks.
IDENTITY = struct.Struct("<8sIIQQQQQQ")
WRITTEN_OFFSET = 120
NUMBER = struct.Struct("<Q")
# number of the record from 1 (0: being written), number of the point, time_ns, size of the text.
RECORD_HEAD = struct.Struct("<QQQI4x")
TEXT_SIZE = 1984  # Room for the text of a record. Our choice: enough for two dozen groups of hyperparameters.
FINGERPRINT_SIZE = 16
ABSENT = bytes(FINGERPRINT_SIZE)
# The fingerprint of a tensor that could not be read on this rank. It is not compared.
UNKNOWN = b"\xff" * FINGERPRINT_SIZE
# The first field of a row in the table: ``[what, name, part, shape, dtype]``.
PARAMETER, GRADIENT, BUFFER, STATE = "p", "g", "b", "s"
STEP, FORWARD, SYNC, END = "step", "forward", "sync", "end"  # clocks of streams in the table
# Prefix of a stream's group in the table if it is a set of device mesh dimensions instead of a process group.
MESH = "mesh "


def slot_size(rows: int) -> int:
    return RECORD_HEAD.size + TEXT_SIZE + rows * FINGERPRINT_SIZE


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8", "replace")


def packed(value: Any) -> str:
    """Return a value as compressed JSON in ASCII, for a note."""
    return base64.b64encode(zlib.compress(compact(value), 6)).decode("ascii")


MIN_SLOTS = 8
MAX_BYTES = 4 * 2**20  # Size limit of one file, unless ``MIN_SLOTS`` records need more. Our choice.
MAX_SLOTS = 128


class FingerprintWriter:
    """A file that this process writes, of ``MIN_SLOTS`` to ``most_slots`` slots. Raises OSError if the disk is full."""

    def __init__(
        self, folder: str, name: str, table: Dict[str, Any], pid: int, start_ticks: int, most_bytes: int = MAX_BYTES,
        most_slots: int = MAX_SLOTS,
    ) -> None:  # fmt: skip
        make_folder(folder)
        rows = len(table["rows"])
        table_bytes = zlib.compress(compact(table), 6)
        self._size = slot_size(rows)
        self._slots = min(max(MIN_SLOTS, most_bytes // self._size), most_slots)
        self._slots_at = HEADER_SIZE + (len(table_bytes) + 7) // 8 * 8
        self.path = os.path.join(folder, name)
        self.total_bytes = self._slots_at + self._slots * self._size
        self._map = allocate(self.path, self.total_bytes)
        self._written = 0
        self._fingerprints_bytes = rows * FINGERPRINT_SIZE
        self._map[HEADER_SIZE : HEADER_SIZE + len(table_bytes)] = table_bytes
        IDENTITY.pack_into(
            self._map, 0, MAGIC, VERSION, rows, len(table_bytes), self._slots_at,
            self._size, self._slots, pid, start_ticks,
        )  # fmt: skip

    def write(self, number: int, text: Dict[str, Any], fingerprints: bytes) -> None:
        """Add a record. A text that is too long is left out. ``fingerprints`` has 16 bytes per row."""
        if len(fingerprints) != self._fingerprints_bytes:
            raise ValueError("%d bytes of fingerprints, not %d" % (len(fingerprints), self._fingerprints_bytes))
        index = self._written + 1
        at = self._slots_at + (index - 1) % self._slots * self._size
        data = compact(text)
        data = data if len(data) <= TEXT_SIZE else b"{}"
        start = at + RECORD_HEAD.size
        NUMBER.pack_into(self._map, at, 0)
        self._map[start : start + len(data)] = data
        start += TEXT_SIZE
        self._map[start : start + len(fingerprints)] = fingerprints
        RECORD_HEAD.pack_into(self._map, at, 0, number, time.monotonic_ns(), len(data))
        NUMBER.pack_into(self._map, at, index)
        self._written = index
        NUMBER.pack_into(self._map, WRITTEN_OFFSET, index)


# The largest unpacked table. Our choice: a limit, because a run folder may come from elsewhere.
MAX_TABLE_BYTES = 64 * 2**20


@dataclass
class FingerprintRecord:
    """One record: its index, the number of its step, its time, its text, and the fingerprints of all rows as bytes."""

    __slots__ = ("fingerprints", "index", "number", "text", "time_ns")
    index: int
    number: int
    time_ns: int
    text: Dict[str, Any]
    fingerprints: bytes


class FingerprintFile:
    """A fingerprint file and its table. Raises ValueError if it is damaged, OSError if it cannot be read."""

    def __init__(self, path: str) -> None:
        with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
            head = file.read(HEADER_SIZE)
            if len(head) < HEADER_SIZE:
                raise ValueError("%s is cut short" % path)
            magic, version, rows, table_size, slots_at, size, slots, pid, ticks = IDENTITY.unpack_from(head)
            if magic != MAGIC or version != VERSION:
                raise ValueError("%s is not a fingerprint file of version %d" % (path, VERSION))
            end = os.fstat(file.fileno()).st_size
            fits = HEADER_SIZE + table_size <= slots_at and slots_at + slots * size <= end
            if size != slot_size(rows) or slots < 1 or not fits:
                raise ValueError("%s is damaged" % path)
            packed = file.read(table_size)
        try:
            self.table = parse_json(zlib.decompressobj().decompress(packed, MAX_TABLE_BYTES))
        except (zlib.error, ValueError) as error:
            raise ValueError("%s is damaged: %s" % (path, error)) from error
        found = self.table.get("rows") if isinstance(self.table, dict) else None
        if not isinstance(found, list) or len(found) != rows:
            raise ValueError("%s is damaged" % path)
        self.path, self.rows = path, found
        self.pid, self.start_ticks = int(pid), int(ticks)
        self.head_bytes, self.record_bytes, self._slots = int(slots_at), int(size), slots

    def read_since(self, index: int, most: Optional[int] = None) -> List[FingerprintRecord]:
        """Return the complete records after ``index`` that are not yet overwritten, oldest first, at most ``most``."""
        found: List[FingerprintRecord] = []
        with os.fdopen(open_plain(self.path, os.O_RDONLY), "rb") as file:
            file.seek(WRITTEN_OFFSET)
            written = NUMBER.unpack(file.read(NUMBER.size))[0]
            for wanted in range(max(index + 1, written - self._slots + 1), written + 1):
                if most is not None and len(found) >= most:
                    break
                at = self.head_bytes + (wanted - 1) % self._slots * self.record_bytes
                file.seek(at)
                data = file.read(self.record_bytes)
                file.seek(at)
                if len(data) < self.record_bytes or file.read(NUMBER.size) != data[: NUMBER.size]:
                    continue
                number_read, number, time_ns, size = RECORD_HEAD.unpack_from(data)
                if number_read != wanted or size > TEXT_SIZE:
                    continue
                start = RECORD_HEAD.size
                try:
                    text = parse_json(data[start : start + size] or b"{}")
                except ValueError:
                    continue
                if isinstance(text, dict):
                    found.append(FingerprintRecord(wanted, number, time_ns, text, data[start + TEXT_SIZE :]))
        return found
