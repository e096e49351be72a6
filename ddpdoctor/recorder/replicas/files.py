"""The fingerprint files of this process, few and small: one per stream, and another one when its rows change."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional

from ..state import here
from ..storage import fingerprint_layout
from ..storage.fingerprint_writing import MAX_BYTES as MAX_FILE_BYTES
from ..storage.fingerprint_writing import MAX_SLOTS, MIN_SLOTS, FingerprintWriter

FOLDER = "prints"
MAX_FILES = 128
"""Per process. Our choice: enough for forty models that are trained one after another."""
MAX_FILES_A_STREAM = 6
"""Our choice: optimizer state appears with the first steps, and more with each part of a model that is unfrozen."""
MAX_ALL_BYTES = 24 * 2**20
"""All files of a process together. Our choice: with the ring, a rank's part of the run folder stays below 32 MiB."""

_ring: Any = None
_files = 0
_bytes = 0
_has_given_up = False


class FingerprintFiles:
    """The files of one stream. ``about`` is its table without rows."""

    def __init__(self, about: Dict[str, Any], most_records: int = MAX_SLOTS) -> None:
        self._about = about
        self._most_records = most_records
        self._rows = 0
        """A hash of the rows. The rows themselves would take hundreds of KiB."""
        self._writer: Optional[FingerprintWriter] = None
        self._made = 0

    def write(self, number: int, text: Dict[str, Any], rows: List[Any], fingerprints: bytes) -> None:
        """Add a record. If there is no space for a file with these rows, nothing is written."""
        key = hash(tuple(rows))
        if self._writer is None or key != self._rows:
            self._rows = key
            self._writer = self._next_writer(rows)
        if self._writer is not None:
            self._writer.write(number, text, fingerprints)

    def _next_writer(self, rows: List[Any]) -> Optional[FingerprintWriter]:
        global _ring, _files, _bytes, _has_given_up
        if _ring is not here.ring:  # a forked child starts at zero
            _ring, _files, _bytes, _has_given_up = here.ring, 0, 0, False
        space = MAX_ALL_BYTES - _bytes
        least = fingerprint_layout.slot_size(len(rows)) * min(self._most_records, MIN_SLOTS)
        if _files >= MAX_FILES or self._made >= MAX_FILES_A_STREAM or least > space:
            _give_up()
            return None
        folder, pid = os.path.join(here.folder, FOLDER), os.getpid()
        name = "%d-%d-%d.prints" % (pid, here.ticks, _files)
        table = dict(self._about, rows=rows)
        most_bytes = min(space, MAX_FILE_BYTES)
        writer = FingerprintWriter(folder, name, table, pid, here.ticks, most_bytes, self._most_records)
        here.kept.append(writer)
        _files += 1
        self._made += 1
        _bytes += writer.total_bytes
        return writer


def _give_up() -> None:
    """Note once that some fingerprints are no longer written."""
    global _has_given_up
    if not _has_given_up and here.ring is not None:
        _has_given_up = here.ring.note({"k": "prints_end", "files": _files, "bytes": _bytes, "at": time.monotonic_ns()})
