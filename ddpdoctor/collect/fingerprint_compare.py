"""Compares the fingerprints of this host's ranks while they write, paired by the number of the point."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.fingerprint_files import DAMAGED, RankColumn, RowsRead, Writer, open_source, root_of
from ddpdoctor.collect.recorded import read_record
from ddpdoctor.model.consistency import Consistency, Difference, Stream, StreamKey, TensorRow, TensorSplit, Values, What
from ddpdoctor.model.words import group_alike
from ddpdoctor.recorder.storage import fingerprint_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ddpdoctor.collect.fingerprint_files import Name, NodeIndex, OpenFile, Written

Token = tuple[bytes, tuple[int, ...], str] | None  # what must be equal; None: no such tensor
MAX_SCALE = 1e300  # larger or non-finite numbers are not a gradient scale
MAX_SPLITS = 16  # of a difference by name; our choice: a report names a few and counts the rest
_Texts = dict[int, dict[str, object]]
_Point = tuple[int, _Texts]
# How many points of a rank we keep until the others have written theirs; the rest wait in its file. Our choice: ranks
# that reduce gradients together are at most one step apart, so a rank that is further behind does not take part.
MAX_AHEAD = 8
MAX_ROUNDS = 128  # of reading a few points of each rank; our choice: enough for all files of a stream
MAX_REASONS = 8  # how many unreadable files we keep the reason for


def has_any(seen: Mapping[int, Written], what: What) -> bool:
    """Return whether a rank has a tensor of this kind."""
    return any(
        written.fingerprints[run].count(0) < run.stop - run.start
        for written in seen.values()
        if what in written.rows.kinds
        for run in written.rows.kinds[what].runs
    )


def _differing(seen: Mapping[int, Written], what: What) -> Iterator[tuple[TensorRow, dict[int, Token]]]:
    """Yield the tensors that differ. A constant (a buffer with a part) may rightly be lacking on some ranks."""
    for row, tokens in _tokens(seen, what):
        lacks = what is What.BUFFER and row.part and None in tokens.values()
        if len(set(tokens.values())) > 1 and not lacks:
            yield row, tokens


def _tokens(seen: Mapping[int, Written], what: What) -> Iterator[tuple[TensorRow, dict[int, Token]]]:
    """Yield each tensor with the token of each rank: first those of the rank with the most tensors, in its order."""
    kinds = {rank: written.rows.kinds.get(what) for rank, written in seen.items()}
    different = {id(kind): kind for kind in kinds.values() if kind is not None}.values()
    rows: dict[Name, TensorRow] = {}
    for kind in sorted(different, key=lambda kind: len(kind.rows), reverse=True):
        for name, (_, row) in kind.rows.items():
            rows.setdefault(name, row)
    for name, row in rows.items():
        tokens: dict[int, Token] = {}
        for rank, of_rank in kinds.items():
            tokens[rank] = None
            if of_rank is not None and name in of_rank.rows:
                at, own = of_rank.rows[name]
                contents = seen[rank].fingerprints[at : at + fingerprint_file.FINGERPRINT_SIZE]
                tokens[rank] = None if contents == fingerprint_file.ABSENT else (contents, own.shape, own.dtype)
        yield row, tokens


class StreamSeen:
    """The results for one stream so far. Points must come in order, each once."""

    def __init__(self, key: StreamKey) -> None:
        self.key = key
        self.ranks: set[int] = set()
        self.compared = 0
        self.differences: dict[What, Difference] = {}
        self._kept: dict[int, _Texts] = {}
        self._last: _Point | None = None
        self._lowest: Written | None = None
        self._last_equal: dict[What, _Point] = {}
        self._same_random = 0
        self._unchanged = 0
        self._parameters: dict[int, bytes] = {}

    def compare(self, number: int, seen: Mapping[int, Written]) -> bool:
        """Compare what ranks wrote at one point; return whether a kind of tensor differs for the first time."""
        point = (number, {rank: seen[rank].text for rank in sorted(seen)})
        known = len(self.differences)
        first, *others = seen.values()
        has_same_rows = all(other.rows is first.rows for other in others)
        # For nearly all points this is the only check needed.
        same = has_same_rows and all(other.fingerprints == first.fingerprints for other in others)
        for what in What:
            if what not in self.differences and has_any(seen, what):
                runs = first.rows.kinds[what].runs if what in first.rows.kinds else ()
                pairs = ((other.fingerprints[run], first.fingerprints[run]) for run in runs for other in others)
                is_equal = same or (has_same_rows and all(root == other for root, other in pairs))
                if is_equal or next(_differing(seen, what), None) is None:
                    self._last_equal[what] = point
                else:
                    equal, differing, splits = self._last_equal.get(what), list(_differing(seen, what)), []
                    for row, tokens in differing[:MAX_SPLITS]:
                        sides = group_alike(tokens)
                        absent_on = dict(sides).get(None, ())
                        splits.append(TensorSplit(row=row, sides=tuple(who for _, who in sides), absent_on=absent_on))
                    last_equal, found = equal[0] if equal else None, tuple(splits)
                    of = sum(any(tokens.values()) for _, tokens in _tokens(seen, what))
                    self.differences[what] = Difference(
                        what=what, number=number, last_equal=last_equal, splits=found, differing=len(differing), of=of
                    )
                    self._kept |= dict(kept for kept in (self._last, equal, point) if kept)
        if not self.compared:
            self._kept[number] = point[1]
        self.compared += 1
        self.ranks.update(seen)
        random = {str(text.get("random") or "") for text in point[1].values()}
        self._same_random += len(random) == 1 and "" not in random
        parameters = {rank: root_of(table.rows, table.fingerprints, (What.PARAMETER,)) for rank, table in seen.items()}
        stood_still = has_any(seen, What.PARAMETER) and parameters.items() <= self._parameters.items()
        self._unchanged = self._unchanged + 1 if stood_still else 0
        self._parameters, self._last, self._lowest = parameters, point, seen[min(seen)]
        return len(self.differences) > known

    def stream(self, writers: Iterable[int]) -> Stream:
        """Return the results so far; ``writers`` are the ranks that wrote anything about this model."""
        points = self._kept | dict([self._last] if self._last else [])

        tensors = 0
        if self._lowest is not None:
            kinds, contents = self._lowest.rows.kinds.values(), self._lowest.fingerprints
            starts = (at for kind in kinds for at, _ in kind.rows.values())
            size, absent = fingerprint_file.FINGERPRINT_SIZE, fingerprint_file.ABSENT
            tensors = sum(contents[at : at + size] != absent for at in starts)
        every = [text.get("every") for text in self._last[1].values()] if self._last else []
        return Stream(
            clock=self.key.clock, group=self.key.group, model=self.key.model, optimizer=self.key.optimizer,
            ranks=tuple(sorted(self.ranks)), compared=self.compared, last_number=self._last[0] if self._last else None,
            tensors=tensors, kinds=tuple(what for what in What if what in self._last_equal or what in self.differences),
            differences=tuple(self.differences.values()),
            values=tuple((number, _values(points[number])) for number in sorted(points)), unchanged=self._unchanged,
            same_random=self._same_random, every=max((steps for steps in every if type(steps) is int), default=0),
            unpaired=tuple(sorted(set(writers) - self.ranks)),
        )  # fmt: skip


def _values(texts: _Texts) -> tuple[Values, ...]:
    values = []
    for rank, text in texts.items():
        given: Any = text.get("settings")  # a list of pairs or a dict
        rows = given.items() if isinstance(given, dict) else given if isinstance(given, list) else ()
        pairs = (row for row in rows if isinstance(row, (list, tuple)) and len(row) == 2)
        settings = tuple((str(name), str(value)) for name, value in pairs)
        scale: Any = text.get("scale")
        is_scale = type(scale) in {int, float} and abs(scale) < MAX_SCALE
        values.append(read_record(Values, text, rank=rank, settings=settings, scale=float(scale) if is_scale else None))
    return tuple(values)


class Paired:
    """One stream: the points that wait for more ranks, and the results for all earlier points."""

    def __init__(self, key: StreamKey, index: NodeIndex | None = None) -> None:
        self.key = key
        self._index = index
        self.seen = StreamSeen(key)
        self.columns: dict[int, RankColumn] = {}
        self._pending: dict[int, dict[int, Written]] = {}
        self._settled = -1
        self._left: set[int] = set()  # ranks that we do not wait for until they write again
        self._waits_for_new = True

    def read(self, *, closing: bool) -> bool:
        """Read a few points of each rank; return whether there were any."""
        any_read = False
        for rank, column in self.columns.items():
            for number, seen in column.read(self._space(rank), closing=closing):
                any_read = True
                self._left.discard(rank)
                if number > self._settled:
                    self._pending.setdefault(number, {})[rank] = seen
        return any_read

    def settle(self, *, others_may_come: bool) -> None:
        """Compare the points that have all their ranks; ``others_may_come`` that have not written here yet."""
        if others_may_come and self._waits_for_new:
            return
        for number in sorted(self._pending):
            if not all(self._needs_no_more(rank, number) for rank in self.columns):
                break
            seen = self._pending.pop(number)
            self._settled = number
            if self._index is not None:
                self._index.note(self.key, number, seen)
            if len(seen) > 1 or (self._index is not None and len(self.columns) == 1):
                self.seen.compare(number, seen)

    def stream(self, writers: Iterable[int]) -> Stream:
        """Return the result for this node's ranks, which is empty if fewer than two ranks were compared."""
        own = self.seen if len(self.seen.ranks) > 1 else StreamSeen(self.key)
        return own.stream(writers)

    def oldest_of_full(self) -> int | None:
        """Return the oldest waiting point if a rank has no room for another, else None."""
        return min(self._pending) if any(self._space(rank) <= 0 for rank in self.columns) else None

    def give_up_waiting(self) -> None:
        """Stop waiting for the ranks that the oldest point lacks, and compare what is there."""
        oldest = min(self._pending)
        self._waits_for_new = False
        self._left |= {rank for rank in self.columns if not self._needs_no_more(rank, oldest)}
        self.settle(others_may_come=False)

    def _space(self, rank: int) -> int:
        return MAX_AHEAD - sum(rank in seen for seen in self._pending.values())

    def _needs_no_more(self, rank: int, number: int) -> bool:
        column = self.columns[rank]
        return column.latest >= number or column.is_over or rank in self._left


class Comparer:
    """The comparison of one attempt of a job on this host, while its ranks write or later."""

    def __init__(
        self, folder: Path, *, check_every: int, allowed: tuple[str, ...] = (), index: NodeIndex | None = None
    ) -> None:
        """Read ``folder``; tensors that match ``allowed`` may differ, and ``index`` keeps points for other nodes."""
        self._folder = folder
        self._check_every = check_every
        self._allowed = allowed
        self._index = index
        self._rows_read = RowsRead(allowed)
        self._writers: dict[tuple[int, int], Writer] = {}
        self._opened: set[Path] = set()
        self._unread: dict[str, str] = {}
        self._ranks: dict[tuple[int, int], int] = {}
        self._streams: dict[StreamKey, Paired] = {}
        self._torn: set[StreamKey] = set()

    def compare(self, writers: Iterable[Writer]) -> bool:
        """Compare what these processes wrote since the last call; return whether a kind differs for the first time."""
        self._writers |= {(writer.pid, writer.ticks): writer for writer in writers}
        known = self._count_differences()
        full = {key: paired.oldest_of_full() for key, paired in self._streams.items()}
        self._read(closing=False)
        for key, oldest in full.items():
            paired = self._streams.get(key)
            if paired is not None and oldest is not None and paired.oldest_of_full() == oldest:
                paired.give_up_waiting()
        return self._count_differences() > known

    def close(self) -> Consistency:
        """Compare all points that two or more ranks wrote, after all processes have stopped writing."""
        self._read(closing=True)
        return self.consistency()

    def consistency(self) -> Consistency:
        """Return the results so far; the bytes are those of the busiest rank."""
        bytes_by_rank: defaultdict[int, int] = defaultdict(int)
        unread = dict(self._unread)
        for paired in self._streams.values():
            for rank, column in paired.columns.items():
                bytes_by_rank[rank] += column.bytes_written
                unread |= dict([column.failed] if column.failed is not None else [])
        return Consistency(
            check_every=self._check_every,
            streams=tuple(
                paired.stream(rank for rank in self._ranks.values() if rank in key.members)
                for key, paired in self._streams.items()
            ),
            allowed=self._allowed,
            bytes_written=max(bytes_by_rank.values(), default=0),
            unread=tuple(f"{name}: {why}" for name, why in sorted(unread.items())[:MAX_REASONS]),
        )

    def found_here(self, key: StreamKey) -> Stream:
        """Return the results for this node's ranks in a stream, even if it has only one rank."""
        paired = self._streams[key]
        return paired.seen.stream(paired.columns)

    def remove_files(self) -> None:
        """Remove the files of all known processes, which have been read."""
        for path in self._paths():
            with contextlib.suppress(OSError):
                path.unlink()

    def _read(self, *, closing: bool) -> None:
        for paired in self._streams.values():
            for column in paired.columns.values():
                column.writer = self._writers[column.writer.pid, column.writer.ticks]
        for path in self._paths():
            if path in self._opened:
                continue
            self._unread.pop(path.name, None)
            try:
                source = open_source(path, self._rows_read)
            except OSError as error:
                self._unread[path.name] = error.strerror or "not to be read"
            except DAMAGED as error:  # or the rank is still writing it, so we try again next time
                self._unread[path.name] = str(error) or type(error).__name__
            else:
                self._opened.add(path)
                self._add(source)
        for _ in range(MAX_ROUNDS):
            any_read = [paired.read(closing=closing) for paired in self._streams.values()]
            for key, paired in self._streams.items():
                # A living process may be a rank that has not written to this stream yet.
                missing = set(key.members) - paired.columns.keys() if not closing else set()
                may_come = bool(missing) and any(
                    writer.ended_ns is None and (who not in self._ranks or self._ranks[who] in missing)
                    for who, writer in self._writers.items()
                )
                paired.settle(others_may_come=may_come)
            if not any(any_read):
                break

    def _paths(self) -> list[Path]:
        paths = []
        for path in self._folder.glob("*.prints"):
            numbers = path.stem.split("-")
            if len(numbers) == 3 and all(number.isdecimal() for number in numbers):
                pid, ticks, position = map(int, numbers)
                if (pid, ticks) in self._writers:
                    paths.append(((pid, ticks, position), path))
        return [path for _, path in sorted(paths)]

    def _add(self, source: OpenFile) -> None:
        who = (source.file.pid, source.file.start_ticks)
        writer = self._writers.get(who)
        if writer is None or source.key in self._torn:
            return
        paired = self._streams.get(source.key)
        column = paired.columns.get(source.rank) if paired is not None else None
        earlier = column.writer if column is not None else None
        is_later = earlier is not None and earlier.ended_ns is not None and earlier.ended_ns <= writer.began_ns
        if paired is None or is_later:
            if self._index is not None:
                self._index.restart(source.key)
            paired = self._streams[source.key] = Paired(source.key, self._index)  # of several jobs, keep the last
        elif earlier is not None and earlier != writer:
            self._torn.add(source.key)
            del self._streams[source.key]
            if self._index is not None:
                self._index.restart(source.key)
            self._unread[f"{source.file.pid}"] = f"several processes at a time are rank {source.rank}"
            return
        self._ranks[who] = source.rank
        paired.columns.setdefault(source.rank, RankColumn(writer)).add(source)

    def _count_differences(self) -> int:
        return sum(len(paired.seen.differences) for paired in self._streams.values())
