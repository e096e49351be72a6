"""Reads the fingerprints that ranks write, and keeps and packs them until we know whether other nodes have the same."""

from __future__ import annotations

import json
import struct
from collections import deque
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import (
    SideKept,
    StepKept,
    StreamClock,
    StreamKept,
    StreamKey,
    StreamRoot,
    TensorRow,
    What,
)
from ddpdoctor.recorder.storage import fingerprint_file
from ddpdoctor.recorder.storage.fingerprint_file import FingerprintFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.consistency import Stream

WHAT = {
    fingerprint_file.PARAMETER: What.PARAMETER,
    fingerprint_file.GRADIENT: What.GRADIENT,
    fingerprint_file.BUFFER: What.BUFFER,
    fingerprint_file.STATE: What.STATE,
}
_CLOCKS = {
    fingerprint_file.STEP: StreamClock.STEP,
    fingerprint_file.FORWARD: StreamClock.FORWARD,
    fingerprint_file.SYNC: StreamClock.SYNC,
    fingerprint_file.END: StreamClock.END,
}
ROOT_SIZE = 16

Name = tuple[str, str]  # identifies a tensor of one kind: its name, and the part of the optimizer's state
# The errors that a damaged, truncated or newer fingerprint file can cause.
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, MemoryError, struct.error)
MAX_KEPT_BYTES = 16 * 2**20  # of a stream; our choice: eight points of 100,000 tensors fit
MAX_KEPT_POINTS = 4096
STREAM_SIZE = 8
BEFORE_ALL = -1  # points are numbered from 0
_RANK_BYTES = 1024  # approximate size of the text that each rank writes with its fingerprints
MAX_BATCH_BYTES = 4 * 2**20  # of a stream; our choice: 64 nodes send this much within seconds
_LETTERS = {what: letter for letter, what in WHAT.items()}


@dataclass(frozen=True, slots=True)
class KindRows:
    """The rows of one kind."""

    rows: dict[Name, tuple[int, TensorRow]]  # the offset of the fingerprint, and the row
    runs: tuple[slice, ...]  # byte ranges of all their fingerprints; adjacent ones are merged


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a table without tensors that may differ. Ranks with equal tables share one object."""

    kinds: dict[What, KindRows]
    digest: bytes  # a hash of these rows in their order


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank wrote at one point."""

    rows: Rows
    fingerprints: bytes
    text: dict[str, Any]


class RowsRead:
    """Makes one ``Rows`` for equal tables: a table can have 100,000 rows, so a copy for each rank would be costly."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = tuple(allowed)
        self._known: dict[bytes, Rows] = {}

    def read(self, table: list[Any]) -> Rows:
        """Return the rows of a table; raises ``ValueError`` or ``TypeError`` if it is damaged."""
        digest = blake2b(repr(table).encode("utf-8", "replace"), digest_size=ROOT_SIZE).digest()
        if digest in self._known:
            return self._known[digest]
        rows: dict[What, dict[Name, tuple[int, TensorRow]]] = {}
        for position, entry in enumerate(table):
            what, name, part, shape, dtype = entry
            size = tuple(map(_whole, shape or ()))
            row = TensorRow(what=WHAT[what], name=str(name), part=str(part or ""), shape=size, dtype=str(dtype))
            if not any(fnmatchcase(row.name, pattern) for pattern in self._allowed):
                at = position * fingerprint_file.FINGERPRINT_SIZE
                rows.setdefault(row.what, {})[row.name, row.part] = (at, row)
        # A hash of the compared rows, which does not depend on where in the table the allowed rows are.
        compared = blake2b(digest_size=ROOT_SIZE)
        for _, row in (place for of_kind in rows.values() for place in of_kind.values()):
            compared.update(repr((row.what.value, row.name, row.part, row.shape, row.dtype)).encode("utf-8", "replace"))
        kinds = {}
        for what, of_kind in rows.items():
            ranges: list[slice] = []
            for start in sorted(at for at, _ in of_kind.values()):
                first = ranges.pop().start if ranges and ranges[-1].stop == start else start
                ranges.append(slice(first, start + fingerprint_file.FINGERPRINT_SIZE))
            kinds[what] = KindRows(of_kind, tuple(ranges))
        self._known[digest] = Rows(kinds=kinds, digest=compared.digest())
        return self._known[digest]


def root_of(rows: Rows, fingerprints: bytes, kinds: Iterable[What] = tuple(What)) -> bytes:
    """Return a 16-byte hash of the table and of the fingerprints of all tensors of these kinds."""
    root = blake2b(key=rows.digest, digest_size=ROOT_SIZE)
    for what in kinds:
        for run in rows.kinds[what].runs if what in rows.kinds else ():
            root.update(fingerprints[run])
    return root.digest()


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a whole number was expected, and it is {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A process that may write fingerprints. Times are CLOCK_MONOTONIC."""

    pid: int
    ticks: int  # when it was started, in clock ticks; unique together with the pid
    began_ns: int = 0
    ended_ns: int | None = None  # None while it lives, or if its end is unknown


@dataclass(slots=True, kw_only=True)
class OpenFile:
    """An open fingerprint file, and how far we have read it."""

    file: FingerprintFile
    key: StreamKey
    rank: int
    rows: Rows
    index: int = 0


def open_source(path: Path, rows_read: RowsRead) -> OpenFile:
    """Open a fingerprint file; raises OSError, or one of ``DAMAGED`` also if the rank still writes its head."""
    file = FingerprintFile(str(path))
    table = file.table
    members, rank = tuple(sorted({_whole(rank) for rank in table["ranks"]})), _whole(table["rank"])
    clock, group, model, optimizer = (table[name] for name in ("clock", "group", "model", "optimizer"))
    key = StreamKey(
        clock=_CLOCKS[clock], group=str(group), members=members, model=_whole(model), optimizer=_whole(optimizer)
    )
    if rank not in key.members:
        raise ValueError(f"rank {rank} is not in its group")
    source = OpenFile(file=file, key=key, rank=rank, rows=rows_read.read(file.rows))
    file.rows.clear()  # RowsRead keeps one copy for all ranks
    return source


class RankColumn:
    """The records of one rank in one stream, in the order of writing."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.latest = -1  # the number of the last point read
        self.is_over = False  # whether no more records will come
        self.bytes_written = 0
        self.failed: tuple[str, str] | None = None  # the name of a file that can no longer be read, and why
        self._sources: list[OpenFile] = []

    def add(self, source: OpenFile) -> None:
        self._sources.append(source)
        self.bytes_written += source.file.head_bytes

    def read(self, most: int, *, closing: bool) -> list[tuple[int, Written]]:
        """Return at most ``most`` new points; ``closing`` means that all processes have stopped writing."""
        points: list[tuple[int, Written]] = []
        while len(points) < most:
            source = self._sources[0]
            records = []
            try:
                records = source.file.read_since(source.index, most - len(points))
            except (OSError, *DAMAGED) as error:
                self.failed = (Path(source.file.path).name, str(error) or type(error).__name__)
            for record in records:
                self.bytes_written += (record.index - source.index) * source.file.record_bytes
                source.index = record.index
                if record.number > self.latest:
                    self.latest = record.number
                    points.append((record.number, Written(source.rows, record.fingerprints, record.text)))
            if records:
                continue
            if len(self._sources) == 1:
                self.is_over = closing or self.failed is not None or self.writer.ended_ns is not None
                break
            del self._sources[0]  # a rank writes to its last file only
        return points


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the ranks of this node wrote at one point of one stream."""

    number: int
    seen: Mapping[int, Written]
    root: bytes
    random: bytes  # the random state if all ranks of the node have the same, else empty
    size_bytes: int


class StreamIndex:
    """The points of one stream, in order."""

    def __init__(self, key: StreamKey, name: str) -> None:
        self.key = key
        self.name = name
        self.points: deque[Kept] = deque()
        self.since = BEFORE_ALL  # the last point that was dropped
        self.upto = BEFORE_ALL  # the last point that was written
        self.ranks: set[int] = set()
        self._size_bytes = 0

    def note(self, number: int, seen: Mapping[int, Written]) -> None:
        """Keep a point, and drop the oldest ones if there are too many."""
        sides: dict[tuple[int, bytes], Written] = {}
        by_rank = {}
        for rank in sorted(seen):
            written = seen[rank]
            same = sides.setdefault((id(written.rows), written.fingerprints), written)
            by_rank[rank] = Written(same.rows, same.fingerprints, written.text)
        # Nodes share the root if all their ranks are equal; if ranks here differ, it is unique to this node.
        root = b"".join(root_of(side.rows, side.fingerprints) for side in sides.values())
        if len(sides) != 1:
            root = blake2b(root + repr(sorted(by_rank)).encode(), digest_size=ROOT_SIZE).digest()
        states = {str(written.text.get("random") or "") for written in seen.values()}
        random = states.pop().encode() if len(states) == 1 else b""
        size_bytes = sum(len(side.fingerprints) for side in sides.values()) + _RANK_BYTES * len(by_rank)
        self.points.append(Kept(number=number, seen=by_rank, root=root, random=random, size_bytes=size_bytes))
        self.upto = number
        self.ranks.update(seen)
        self._size_bytes += size_bytes
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
        index = self._by_key.get(key)
        if index is None:
            which = repr((self._attempt, self._begun.get(key, 0), key)).encode("utf-8", "replace")
            index = self._by_key[key] = StreamIndex(key, blake2b(which, digest_size=STREAM_SIZE).hexdigest())
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
        return [stream for stream in self.streams.values() if not stream.ranks.issuperset(stream.key.members)]

    def report(self) -> tuple[StreamRoot, ...]:
        reports = []
        for index in (index for index in self.shared() if index.points):
            root, random = index.root(index.since, index.upto)
            ranks = tuple(sorted(index.ranks))
            reports.append(
                StreamRoot(stream=index.name, ranks=ranks, since=index.since, upto=index.upto, root=root, random=random)
            )
        return tuple(reports)


Points = dict[int, dict[int, Written]]  # what each rank wrote, by the number of the point


def pack_stream(index: StreamIndex, found: Stream) -> StreamKept:
    """Return a stream for sending, with its oldest points (as many as fit) and what was ``found`` in it."""
    tables: dict[int, tuple[int, Rows]] = {}
    points: list[StepKept] = []
    space = MAX_BATCH_BYTES
    for kept in index.points:
        ranks_by_side: dict[tuple[int, bytes], list[int]] = {}
        for rank, seen in kept.seen.items():
            tables.setdefault(id(seen.rows), (len(tables), seen.rows))
            ranks_by_side.setdefault((tables[id(seen.rows)][0], seen.fingerprints), []).append(rank)
        sides = []
        for (table, fingerprints), ranks in ranks_by_side.items():
            # Those of the rows that we compare, in their order, without tensors that may differ.
            kinds = kept.seen[ranks[0]].rows.kinds.values()
            starts = (at for kind in kinds for at, _ in kind.rows.values())
            compared = b"".join(fingerprints[at : at + fingerprint_file.FINGERPRINT_SIZE] for at in starts)
            texts = tuple(json.dumps(kept.seen[rank].text) for rank in ranks)
            sides.append(SideKept(ranks=tuple(ranks), table=table, fingerprints=compared.hex(), texts=texts))
        point = StepKept(number=kept.number, sides=tuple(sides))
        space -= sum(len(side.fingerprints) + sum(map(len, side.texts)) for side in point.sides)
        if space < 0 and points:
            break
        points.append(point)
    return StreamKept(
        **{field.name: getattr(index.key, field.name) for field in fields(StreamKey)},
        name=index.name,
        tables=tuple(
            tuple(row for kind in rows.kinds.values() for _, row in kind.rows.values()) for _, rows in tables.values()
        ),
        points=tuple(points),
        found=found,
    )


def unpack_points(kept: StreamKept, rows_read: RowsRead) -> Points:
    """Return the points by number; raises ``ValueError`` or ``TypeError`` if they are damaged."""
    tables = [  # rows in the format of a rank's table
        rows_read.read([[_LETTERS[row.what], row.name, row.part, list(row.shape), row.dtype] for row in table])
        for table in kept.tables
    ]
    sizes = [len(table) * fingerprint_file.FINGERPRINT_SIZE for table in kept.tables]
    members = set(kept.members)
    points: Points = {}
    for point in kept.points:
        by_rank = points[point.number] = {}
        for side in point.sides:
            if not 0 <= side.table < len(tables) or len(side.texts) != len(side.ranks):
                raise ValueError("a side without a table, or without texts")
            fingerprints = bytes.fromhex(side.fingerprints)
            if len(fingerprints) != sizes[side.table] or not members.issuperset(side.ranks):
                raise ValueError("a side with the fingerprints of another table, or with ranks outside its group")
            for rank, text in zip(side.ranks, map(json.loads, side.texts), strict=True):
                if not isinstance(text, dict):
                    raise TypeError("a text that is not a JSON object")
                by_rank[rank] = Written(tables[side.table], fingerprints, text)
    return points
