"""Reads fingerprint files (see ``fingerprint_layout``) that their rank may still be writing."""

from __future__ import annotations

import os
import zlib
from typing import Any, Dict, List, Optional

from . import fingerprint_layout
from .files import open_plain, parse_json

MAX_TABLE_BYTES = 64 * 2**20
"""The largest unpacked table. Our choice: a limit, because a run folder may come from elsewhere."""


class FingerprintRecord:
    """One record: its index, the number of its step, its time, its text, and the fingerprints of all rows as bytes."""

    __slots__ = ("fingerprints", "index", "number", "text", "time_ns")

    def __init__(self, index: int, number: int, time_ns: int, text: Dict[str, Any], fingerprints: bytes) -> None:
        self.index = index
        self.number = number
        self.time_ns = time_ns
        self.text = text
        self.fingerprints = fingerprints


class FingerprintFile:
    """A fingerprint file and its table.

    Raises:
        ValueError: the file is no fingerprint file, is damaged, or has another version.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
            head = file.read(fingerprint_layout.HEADER_SIZE)
            if len(head) < fingerprint_layout.HEADER_SIZE:
                raise ValueError("%s is cut short" % path)
            magic, version, rows, table_size, slots_at, size, slots, pid, ticks = (
                fingerprint_layout.IDENTITY.unpack_from(head)
            )
            if magic != fingerprint_layout.MAGIC or version != fingerprint_layout.VERSION:
                raise ValueError("%s is no file of fingerprints of version %d" % (path, fingerprint_layout.VERSION))
            end = os.fstat(file.fileno()).st_size
            fits = fingerprint_layout.HEADER_SIZE + table_size <= slots_at and slots_at + slots * size <= end
            if size != fingerprint_layout.slot_size(rows) or slots < 1 or not fits:
                raise ValueError("%s is damaged" % path)
            self.table = _table(file.read(table_size), path)
        self.path = path
        self.pid = int(pid)
        self.start_ticks = int(ticks)
        self.rows: List[Any] = self.table["rows"]
        self.head_bytes = int(slots_at)
        self.record_bytes = int(size)
        self._slots = slots
        if len(self.rows) != rows:
            raise ValueError("%s is damaged" % path)

    def read_since(self, index: int, most: Optional[int] = None) -> List[FingerprintRecord]:
        """Return the complete records after ``index`` that are not yet overwritten, oldest first, at most ``most``."""
        found: List[FingerprintRecord] = []
        with os.fdopen(open_plain(self.path, os.O_RDONLY), "rb") as file:
            file.seek(fingerprint_layout.WRITTEN_OFFSET)
            written = fingerprint_layout.NUMBER.unpack(file.read(fingerprint_layout.NUMBER.size))[0]
            for wanted in range(max(index + 1, written - self._slots + 1), written + 1):
                if most is not None and len(found) >= most:
                    break
                record = self._read(file, wanted)
                if record is not None:
                    found.append(record)
        return found

    def _read(self, file: Any, wanted: int) -> Any:
        at = self.head_bytes + (wanted - 1) % self._slots * self.record_bytes
        file.seek(at)
        data = file.read(self.record_bytes)
        file.seek(at)
        if (
            len(data) < self.record_bytes
            or file.read(fingerprint_layout.NUMBER.size) != data[: fingerprint_layout.NUMBER.size]
        ):
            return None
        index, number, time_ns, size = fingerprint_layout.RECORD_HEAD.unpack_from(data)
        if index != wanted or size > fingerprint_layout.TEXT_SIZE:
            return None
        start = fingerprint_layout.RECORD_HEAD.size
        try:
            text = parse_json(data[start : start + size] or b"{}")
        except ValueError:
            return None
        fingerprints = data[start + fingerprint_layout.TEXT_SIZE :]
        return FingerprintRecord(index, number, time_ns, text, fingerprints) if isinstance(text, dict) else None


def _table(packed: bytes, path: str) -> Dict[str, Any]:
    try:
        table = parse_json(zlib.decompressobj().decompress(packed, MAX_TABLE_BYTES))
    except (zlib.error, ValueError) as error:
        raise ValueError("%s is damaged: %s" % (path, error)) from error
    if not isinstance(table, dict) or not isinstance(table.get("rows"), list):
        raise ValueError("%s is damaged" % path)  # noqa: TRY004 - the file is wrong, not a caller
    return table
