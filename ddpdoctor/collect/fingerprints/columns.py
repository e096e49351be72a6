"""Reads one rank's fingerprints of one stream. The rank begins a new file when its rows change."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprints.differences import Written
from ddpdoctor.collect.fingerprints.tables import read_key
from ddpdoctor.recorder.storage.fingerprint_reading import FingerprintFile

if TYPE_CHECKING:
    from ddpdoctor.collect.fingerprints.tables import Rows, RowsRead
    from ddpdoctor.model.replica_records import StreamKey
    from ddpdoctor.recorder.storage.fingerprint_reading import FingerprintRecord

DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, MemoryError, struct.error)
"""The errors that a damaged, truncated or newer fingerprint file can cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A process that may write fingerprints. Times are CLOCK_MONOTONIC."""

    pid: int
    ticks: int
    """When it was started, in clock ticks; unique together with the pid."""
    began_ns: int = 0
    ended_ns: int | None = None
    """None while it lives, or if its end is unknown."""


@dataclass(slots=True, kw_only=True)
class OpenFile:
    """An open fingerprint file, and how far we have read it."""

    file: FingerprintFile
    key: StreamKey
    rank: int
    rows: Rows
    index: int = 0


def open_source(path: Path, rows_read: RowsRead) -> OpenFile:
    """Open a fingerprint file.

    Raises:
        OSError: the file cannot be read.
        DAMAGED: it is not a fingerprint file, or it is incomplete.
    """
    file = FingerprintFile(str(path))
    key, rank = read_key(file.table)
    source = OpenFile(file=file, key=key, rank=rank, rows=rows_read.read(file.rows))
    file.rows.clear()  # RowsRead keeps one copy for all ranks
    return source


class RankColumn:
    """The records of one rank in one stream, in the order of writing."""

    def __init__(self, writer: Writer) -> None:
        """Begin without a file."""
        self.writer = writer
        self.latest = -1
        """The number of the last point read."""
        self.is_over = False
        """Whether no more records will come."""
        self.bytes_written = 0
        self.failed: tuple[str, str] | None = None
        """The name of a file that can no longer be read, and why."""
        self._sources: list[OpenFile] = []

    def add(self, source: OpenFile) -> None:
        """Add a later file of this rank."""
        self._sources.append(source)
        self.bytes_written += source.file.head_bytes

    def read(self, most: int, *, closing: bool) -> list[tuple[int, Written]]:
        """Return at most ``most`` new points; ``closing`` means that all processes have stopped writing."""
        found: list[tuple[int, Written]] = []
        while len(found) < most:
            source = self._sources[0]
            records = self._records(source, most - len(found))
            for record in records:
                self.bytes_written += (record.index - source.index) * source.file.record_bytes
                source.index = record.index
                if record.number > self.latest:
                    self.latest = record.number
                    found.append((record.number, Written(source.rows, record.fingerprints, record.text)))
            if records:
                continue
            if len(self._sources) == 1:
                self.is_over = closing or self.failed is not None or self.writer.ended_ns is not None
                break
            del self._sources[0]  # a rank writes to its last file only
        return found

    def _records(self, source: OpenFile, most: int) -> list[FingerprintRecord]:
        try:
            return source.file.read_since(source.index, most)
        except (OSError, *DAMAGED) as error:
            self.failed = (Path(source.file.path).name, str(error) or type(error).__name__)
            return []
