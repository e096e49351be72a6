"""Reads the table of a file of fingerprints: which stream it belongs to, and which tensors its rows stand for."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import StreamClock, TensorRow, What
from ddpdoctor.recorder.storage import fingerprint_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WHAT = {
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
"""What tells tensors of one kind apart: the name, and which part of the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKey:
    """What the records of several ranks must have in common to be compared."""

    clock: StreamClock
    group: str
    members: tuple[int, ...]
    """Ranks of the group; groups of different ranks may share a name."""
    model: int
    optimizer: int


@dataclass(frozen=True, slots=True)
class KindRows:
    """The rows of one kind."""

    rows: dict[Name, tuple[int, TensorRow]]
    """By name, in the order of the model: where the fingerprint of each begins, in bytes."""
    runs: tuple[slice, ...]
    """Where the fingerprints of all of them are, neighbours as one."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a table without those that may differ; one object for all ranks that have the same."""

    kinds: dict[What, KindRows]
    digest: bytes
    """Equal where these rows are, in their order."""


class RowsRead:
    """Makes ``Rows`` of tables, and the same of equal ones: of hundred thousand rows, a copy a rank would be felt."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """Take patterns of names that are left out."""
        self._allowed = tuple(allowed)
        self._known: dict[bytes, Rows] = {}

    def read(self, table: list[Any]) -> Rows:
        """Return the rows of a table. Raises ``ValueError`` or ``TypeError`` where it is damaged."""
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


def root_of(rows: Rows, prints: bytes, kinds: Iterable[What] = tuple(What)) -> bytes:
    """Return 16 bytes that are equal where tables are, and the contents of all tensors of these kinds.

    With all kinds, this is what nodes hold against each other (see ``print_ledger``). Only where roots differ does a
    node send the fingerprints of one rank of each of its sides, 16 bytes a tensor, and the names of their rows.
    """
    root = blake2b(key=rows.digest, digest_size=ROOT_SIZE)
    for what in kinds:
        for run in rows.kinds[what].runs if what in rows.kinds else ():
            root.update(prints[run])
    return root.digest()


def _digest(kinds: dict[What, KindRows]) -> bytes:
    """Return what two nodes find equal, wherever in a table the rows stand that may differ."""
    digest = blake2b(digest_size=ROOT_SIZE)
    for kind in kinds.values():
        for _, row in kind.rows.values():
            digest.update(repr((row.what.value, row.name, row.part, row.shape, row.dtype)).encode("utf-8", "replace"))
    return digest.digest()


def _read_row(entry: Any) -> TensorRow:
    what, name, part, shape, dtype = entry
    return TensorRow(
        what=_WHAT[what], name=str(name), part=str(part or ""), shape=tuple(map(_whole, shape or ())), dtype=str(dtype)
    )


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a whole number was expected, and it is {type(value).__name__}")
    return value


def _runs(starts: Iterable[int]) -> tuple[slice, ...]:
    """Return where neighbouring fingerprints begin and end."""
    found: list[slice] = []
    for start in sorted(starts):
        end = start + fingerprint_layout.FINGERPRINT_SIZE
        if found and found[-1].stop == start:
            found[-1] = slice(found[-1].start, end)
        else:
            found.append(slice(start, end))
    return tuple(found)
