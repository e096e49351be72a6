"""Reads the table of a fingerprint file: its stream, and the tensor of each row."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import StreamClock, TensorRow, What
from ddpdoctor.model.replica_records import StreamKey
from ddpdoctor.recorder.storage import fingerprint_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WHAT = {
    fingerprint_layout.PARAMETER: What.PARAMETER,
    fingerprint_layout.GRADIENT: What.GRADIENT,
    fingerprint_layout.BUFFER: What.BUFFER,
    fingerprint_layout.STATE: What.STATE,
}
_CLOCKS = {
    fingerprint_layout.STEP: StreamClock.STEP,
    fingerprint_layout.FORWARD: StreamClock.FORWARD,
    fingerprint_layout.SYNC: StreamClock.SYNC,
    fingerprint_layout.END: StreamClock.END,
}
ROOT_SIZE = 16

Name = tuple[str, str]
"""Identifies a tensor of one kind: its name, and the part of the optimizer's state."""


@dataclass(frozen=True, slots=True)
class KindRows:
    """The rows of one kind."""

    rows: dict[Name, tuple[int, TensorRow]]
    """By name, in the order of the model: the byte offset of the tensor's fingerprint, and its row."""
    runs: tuple[slice, ...]
    """Byte ranges of all their fingerprints; adjacent ones are merged."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a table without tensors that may differ. Ranks with equal tables share one object."""

    kinds: dict[What, KindRows]
    digest: bytes
    """A hash of these rows in their order."""


class RowsRead:
    """Makes one ``Rows`` for equal tables: a table can have 100,000 rows, so a copy for each rank would be costly."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """Leave out tensors whose names match one of the ``allowed`` patterns."""
        self._allowed = tuple(allowed)
        self._known: dict[bytes, Rows] = {}

    def read(self, table: list[Any]) -> Rows:
        """Return the rows of a table; raises ``ValueError`` or ``TypeError`` if it is damaged."""
        digest = blake2b(repr(table).encode("utf-8", "replace"), digest_size=ROOT_SIZE).digest()
        rows = self._known.get(digest)
        if rows is None:
            kinds = self._kinds(table)
            rows = self._known[digest] = Rows(kinds=kinds, digest=_digest(kinds))
        return rows

    def _kinds(self, table: list[Any]) -> dict[What, KindRows]:
        rows: dict[What, dict[Name, tuple[int, TensorRow]]] = {}
        for position, entry in enumerate(table):
            row = _read_row(entry)
            if not any(fnmatchcase(row.name, pattern) for pattern in self._allowed):
                at = position * fingerprint_layout.FINGERPRINT_SIZE
                rows.setdefault(row.what, {})[row.name, row.part] = (at, row)
        return {what: KindRows(of_kind, _runs(at for at, _ in of_kind.values())) for what, of_kind in rows.items()}


def read_key(table: dict[str, Any]) -> tuple[StreamKey, int]:
    """Return the stream of a table, and the rank that wrote it.

    Raises:
        ValueError, TypeError, KeyError: the table is damaged.
    """
    key = StreamKey(
        clock=_CLOCKS[table["clock"]],
        group=str(table["group"]),
        members=tuple(sorted({_whole(rank) for rank in table["ranks"]})),
        model=_whole(table["model"]),
        optimizer=_whole(table["optimizer"]),
    )
    rank = _whole(table["rank"])
    if rank not in key.members:
        raise ValueError(f"rank {rank} is not in its group")
    return key, rank


def root_of(rows: Rows, fingerprints: bytes, kinds: Iterable[What] = tuple(What)) -> bytes:
    """Return a 16-byte hash of the table and of the fingerprints of all tensors of these kinds.

    Nodes compare the hash over all kinds (see ``index.py``). Only if hashes differ does a node send fingerprints, 16
    bytes for each tensor, with the names of the rows. It sends them once for ranks that agree with each other.
    """
    root = blake2b(key=rows.digest, digest_size=ROOT_SIZE)
    for what in kinds:
        for run in rows.kinds[what].runs if what in rows.kinds else ():
            root.update(fingerprints[run])
    return root.digest()


def _digest(kinds: dict[What, KindRows]) -> bytes:
    """Return a hash of the compared rows, which does not depend on where in the table the allowed rows are."""
    digest = blake2b(digest_size=ROOT_SIZE)
    for kind in kinds.values():
        for _, row in kind.rows.values():
            digest.update(repr((row.what.value, row.name, row.part, row.shape, row.dtype)).encode("utf-8", "replace"))
    return digest.digest()


def _read_row(entry: Any) -> TensorRow:
    what, name, part, shape, dtype = entry
    return TensorRow(
        what=WHAT[what], name=str(name), part=str(part or ""), shape=tuple(map(_whole, shape or ())), dtype=str(dtype)
    )


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a whole number was expected, and it is {type(value).__name__}")
    return value


def _runs(starts: Iterable[int]) -> tuple[slice, ...]:
    """Return the byte ranges of fingerprints, with adjacent ones merged."""
    found: list[slice] = []
    for start in sorted(starts):
        end = start + fingerprint_layout.FINGERPRINT_SIZE
        if found and found[-1].stop == start:
            found[-1] = slice(found[-1].start, end)
        else:
            found.append(slice(start, end))
    return tuple(found)
