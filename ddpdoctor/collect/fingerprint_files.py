"""Reads the fingerprints that ranks write, and keeps and packs them until we know whether other nodes have the same.

A rank begins a new file when its rows change. Ranks with equal tables share one object.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import StreamClock, TensorRow, What
from ddpdoctor.model.replica_records import SideKept, StepKept, StreamKept, StreamKey, StreamRoot
from ddpdoctor.recorder.storage import fingerprint_layout
from ddpdoctor.recorder.storage.fingerprint_reading import FingerprintFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ddpdoctor.model.consistency import Stream
    from ddpdoctor.recorder.storage.fingerprint_reading import FingerprintRecord


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


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank wrote at one point."""

    rows: Rows
    fingerprints: bytes
    text: dict[str, Any]


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
        return {
            what: KindRows(of_kind, _byte_ranges(at for at, _ in of_kind.values())) for what, of_kind in rows.items()
        }


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


def _byte_ranges(starts: Iterable[int]) -> tuple[slice, ...]:
    """Return the byte ranges of fingerprints, with adjacent ones merged."""
    found: list[slice] = []
    for start in sorted(starts):
        end = start + fingerprint_layout.FINGERPRINT_SIZE
        if found and found[-1].stop == start:
            found[-1] = slice(found[-1].start, end)
        else:
            found.append(slice(start, end))
    return tuple(found)


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


MAX_KEPT_BYTES = 16 * 2**20
"""Limit for one stream. Our choice: eight points of 100,000 tensors fit, and nodes compare every few seconds."""
MAX_KEPT_POINTS = 4096
STREAM_SIZE = 8
BEFORE_ALL = -1
"""Points are numbered from 0."""
_RANK_BYTES = 1024
"""Approximate size of the text that each rank writes with its fingerprints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the ranks of this node wrote at one point of one stream."""

    number: int
    seen: Mapping[int, Written]
    root: bytes
    random: bytes
    """The random state if all ranks of the node have the same, else empty."""
    size_bytes: int


class StreamIndex:
    """The points of one stream, in order."""

    def __init__(self, key: StreamKey, name: str) -> None:
        """Begin without points."""
        self.key = key
        self.name = name
        self.points: deque[Kept] = deque()
        self.since = BEFORE_ALL
        """The last point that was dropped."""
        self.upto = BEFORE_ALL
        """The last point that was written."""
        self.ranks: set[int] = set()
        self._size_bytes = 0

    def note(self, number: int, seen: Mapping[int, Written]) -> None:
        """Keep a point, and drop the oldest ones if there are too many."""
        kept = _kept(number, seen)
        self.points.append(kept)
        self.upto = number
        self.ranks.update(seen)
        self._size_bytes += kept.size_bytes
        while len(self.points) > MAX_KEPT_POINTS or (self._size_bytes > MAX_KEPT_BYTES and len(self.points) > 1):
            self._forget_oldest()

    def forget(self, upto: int) -> None:
        """Drop the points up to a number, because they have been compared with the other nodes."""
        while self.points and self.points[0].number <= upto:
            self._forget_oldest()
        self.since = max(self.since, upto)

    def root(self, since: int, upto: int) -> tuple[str, str]:
        """Return hashes of a range of points: of the contents, and of the random states (empty if ranks differ)."""
        contents, random = blake2b(digest_size=ROOT_SIZE), blake2b(digest_size=STREAM_SIZE)
        is_one_state = True
        for kept in self.points:
            if since < kept.number <= upto:
                contents.update(kept.number.to_bytes(8, "little") + kept.root)
                random.update(kept.random)
                is_one_state = is_one_state and kept.random != b""
        return contents.hexdigest(), random.hexdigest() if is_one_state else ""

    def report(self) -> StreamRoot:
        """Return this stream's report for the other nodes."""
        root, random = self.root(self.since, self.upto)
        return StreamRoot(
            stream=self.name,
            ranks=tuple(sorted(self.ranks)),
            since=self.since,
            upto=self.upto,
            root=root,
            random=random,
        )

    def _forget_oldest(self) -> None:
        gone = self.points.popleft()
        self._size_bytes -= gone.size_bytes
        self.since = max(self.since, gone.number)


class NodeIndex:
    """All streams of one attempt, on one node."""

    def __init__(self, attempt: int = 0) -> None:
        """Begin without streams; ``attempt`` is the number that all nodes share for this attempt."""
        self.streams: dict[str, StreamIndex] = {}
        self._attempt = attempt
        self._by_key: dict[StreamKey, StreamIndex] = {}
        self._begun: dict[StreamKey, int] = {}
        """How often each stream was begun, so that two jobs of the same ranks are never compared with each other."""

    def note(self, key: StreamKey, number: int, seen: Mapping[int, Written]) -> None:
        """Keep what ranks of this node wrote at one point."""
        index = self._by_key.get(key)
        if index is None:
            index = self._by_key[key] = StreamIndex(key, self._name(key))
            self.streams[index.name] = index
        index.note(number, seen)

    def restart(self, key: StreamKey) -> None:
        """Begin a stream again, and drop what an earlier job of the same ranks wrote to it."""
        self._begun[key] = self._begun.get(key, 0) + 1
        gone = self._by_key.pop(key, None)
        if gone is not None:
            del self.streams[gone.name]

    def shared(self) -> list[StreamIndex]:
        """Return the streams that ranks of other nodes also write."""
        return [one for one in self.streams.values() if not one.ranks.issuperset(one.key.members)]

    def report(self) -> tuple[StreamRoot, ...]:
        """Return the reports for the other nodes."""
        return tuple(one.report() for one in self.shared() if one.points)

    def _name(self, key: StreamKey) -> str:
        which = repr((self._attempt, self._begun.get(key, 0), key))
        return blake2b(which.encode("utf-8", "replace"), digest_size=STREAM_SIZE).hexdigest()


def _kept(number: int, seen: Mapping[int, Written]) -> Kept:
    shared: dict[tuple[int, bytes], Written] = {}
    those = {}
    for rank in sorted(seen):
        one = seen[rank]
        same = shared.setdefault((id(one.rows), one.fingerprints), one)
        those[rank] = Written(same.rows, same.fingerprints, one.text)
    random = {str(one.text.get("random") or "") for one in seen.values()}
    return Kept(
        number=number,
        seen=those,
        root=_root_of_sides(shared.values(), those),
        random=random.pop().encode() if len(random) == 1 else b"",
        size_bytes=sum(len(one.fingerprints) for one in shared.values()) + _RANK_BYTES * len(those),
    )


def _root_of_sides(sides: Collection[Written], ranks: Iterable[int]) -> bytes:
    """Return a hash that nodes share if all their ranks are equal; if ranks here differ, it is unique to this node."""
    roots = b"".join(root_of(one.rows, one.fingerprints) for one in sides)
    if len(sides) == 1:
        return roots
    return blake2b(roots + repr(sorted(ranks)).encode(), digest_size=ROOT_SIZE).digest()


MAX_BATCH_BYTES = 4 * 2**20
"""Limit for one stream. Our choice: 64 nodes send this much within seconds. A batch always has one point."""
_LETTERS = {what: letter for letter, what in WHAT.items()}
Points = dict[int, dict[int, Written]]
"""What each rank wrote, by the number of the point."""


def pack_stream(index: StreamIndex, found: Stream) -> StreamKept:
    """Return a stream for sending, with its oldest points (as many as fit) and what was ``found`` in it."""
    tables: dict[int, tuple[int, Rows]] = {}
    points: list[StepKept] = []
    space = MAX_BATCH_BYTES
    for one in index.points:
        point = _pack_point(one, tables)
        space -= sum(len(side.fingerprints) + sum(map(len, side.texts)) for side in point.sides)
        if space < 0 and points:
            break
        points.append(point)
    return StreamKept(
        **{one.name: getattr(index.key, one.name) for one in fields(StreamKey)},
        name=index.name,
        tables=tuple(_rows_in_order(rows) for _, rows in tables.values()),
        points=tuple(points),
        found=found,
    )


def unpack_points(kept: StreamKept, rows_read: RowsRead) -> Points:
    """Return the points by number.

    Raises:
        ValueError, TypeError: the points are damaged.
    """
    tables = [rows_read.read([_as_written(row) for row in table]) for table in kept.tables]
    sizes = [len(table) * fingerprint_layout.FINGERPRINT_SIZE for table in kept.tables]
    return {one.number: _unpack_point(one, tables, sizes, set(kept.members)) for one in kept.points}


def _pack_point(one: Kept, tables: dict[int, tuple[int, Rows]]) -> StepKept:
    sides: dict[tuple[int, bytes], list[int]] = {}
    for rank, seen in one.seen.items():
        tables.setdefault(id(seen.rows), (len(tables), seen.rows))
        sides.setdefault((tables[id(seen.rows)][0], seen.fingerprints), []).append(rank)
    return StepKept(
        number=one.number,
        sides=tuple(
            SideKept(
                ranks=tuple(ranks),
                table=table,
                fingerprints=_fingerprints_in_order(one.seen[ranks[0]]).hex(),
                texts=tuple(json.dumps(one.seen[rank].text) for rank in ranks),
            )
            for (table, _), ranks in sides.items()
        ),
    )


def _rows_in_order(rows: Rows) -> tuple[TensorRow, ...]:
    return tuple(row for kind in rows.kinds.values() for _, row in kind.rows.values())


def _fingerprints_in_order(seen: Written) -> bytes:
    """Return the fingerprints of the rows that we compare, without tensors that may differ."""
    starts = (at for kind in seen.rows.kinds.values() for at, _ in kind.rows.values())
    return b"".join(seen.fingerprints[at : at + fingerprint_layout.FINGERPRINT_SIZE] for at in starts)


def _as_written(row: TensorRow) -> list[Any]:
    """Return a row in the format of a rank's table."""
    return [_LETTERS[row.what], row.name, row.part, list(row.shape), row.dtype]


def _unpack_point(
    point: StepKept, tables: list[Rows], sizes: list[int], members: set[int]
) -> dict[int, Written]:  # fmt: skip
    found: dict[int, Written] = {}
    for side in point.sides:
        if not 0 <= side.table < len(tables) or len(side.texts) != len(side.ranks):
            raise ValueError("a side without a table, or without texts")
        fingerprints = bytes.fromhex(side.fingerprints)
        if len(fingerprints) != sizes[side.table] or not members.issuperset(side.ranks):
            raise ValueError(
                "a side whose fingerprints are not those of its table, or whose ranks are not in its group"
            )
        found |= {rank: Written(tables[side.table], fingerprints, _json_object(text)) for rank, text in _pairs(side)}
    return found


def _pairs(side: SideKept) -> Iterable[tuple[int, str]]:
    return zip(side.ranks, side.texts, strict=True)


def _json_object(text: str) -> dict[str, Any]:
    read = json.loads(text)
    if not isinstance(read, dict):
        raise TypeError("a text that is not a JSON object")
    return read
