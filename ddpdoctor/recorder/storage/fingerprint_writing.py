"""Writes fingerprint files (see ``fingerprint_layout``) from inside a rank."""

from __future__ import annotations

import json
import os
import time
import zlib
from typing import Any, Dict

from . import fingerprint_layout
from .files import make_folder
from .ring_writing import allocate

MIN_SLOTS = 8
MAX_BYTES = 4 * 2**20
"""Size limit of one file, unless ``MIN_SLOTS`` records need more. Our choice."""
MAX_SLOTS = 128


class FingerprintWriter:
    """A fingerprint file that this process writes.

    It has as many slots as fit into ``most_bytes``, at least ``MIN_SLOTS``, but never more than ``most_slots``.

    Raises:
        OSError: the file cannot be made, or there is no room for all of it.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        table: Dict[str, Any],
        pid: int,
        start_ticks: int,
        most_bytes: int = MAX_BYTES,
        most_slots: int = MAX_SLOTS,
    ) -> None:
        make_folder(folder)
        rows = len(table["rows"])
        packed = zlib.compress(json.dumps(table, separators=(",", ":")).encode("utf-8", "replace"), 6)
        self._size = fingerprint_layout.slot_size(rows)
        self._slots = min(max(MIN_SLOTS, most_bytes // self._size), most_slots)
        self._slots_at = fingerprint_layout.HEADER_SIZE + (len(packed) + 7) // 8 * 8
        self.path = os.path.join(folder, name)
        self.total_bytes = self._slots_at + self._slots * self._size
        self._map = allocate(self.path, self.total_bytes)
        self._written = 0
        self._fingerprints_bytes = rows * fingerprint_layout.FINGERPRINT_SIZE
        self._map[fingerprint_layout.HEADER_SIZE : fingerprint_layout.HEADER_SIZE + len(packed)] = packed
        fingerprint_layout.IDENTITY.pack_into(
            self._map, 0, fingerprint_layout.MAGIC, fingerprint_layout.VERSION, rows, len(packed), self._slots_at,
            self._size, self._slots, pid, start_ticks,
        )  # fmt: skip

    def write(self, number: int, text: Dict[str, Any], fingerprints: bytes) -> None:
        """Add a record. A text that is too long is left out. ``fingerprints`` has 16 bytes per row."""
        if len(fingerprints) != self._fingerprints_bytes:
            raise ValueError("%d bytes of fingerprints, not %d" % (len(fingerprints), self._fingerprints_bytes))
        index = self._written + 1
        at = self._slots_at + (index - 1) % self._slots * self._size
        data = json.dumps(text, separators=(",", ":")).encode("ascii", "replace")
        data = data if len(data) <= fingerprint_layout.TEXT_SIZE else b"{}"
        start = at + fingerprint_layout.RECORD_HEAD.size
        fingerprint_layout.NUMBER.pack_into(self._map, at, 0)
        self._map[start : start + len(data)] = data
        start += fingerprint_layout.TEXT_SIZE
        self._map[start : start + len(fingerprints)] = fingerprints
        fingerprint_layout.RECORD_HEAD.pack_into(self._map, at, 0, number, time.monotonic_ns(), len(data))
        fingerprint_layout.NUMBER.pack_into(self._map, at, index)
        self._written = index
        fingerprint_layout.NUMBER.pack_into(self._map, fingerprint_layout.WRITTEN_OFFSET, index)
