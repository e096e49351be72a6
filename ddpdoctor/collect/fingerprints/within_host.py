"""Compares the fingerprints of this host's ranks point by point, while the ranks are still writing."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprints.columns import DAMAGED, RankColumn, Writer, open_source
from ddpdoctor.collect.fingerprints.pairing import Paired
from ddpdoctor.collect.fingerprints.tables import RowsRead
from ddpdoctor.model.consistency import Consistency

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.collect.fingerprints.columns import OpenFile
    from ddpdoctor.collect.fingerprints.index import NodeIndex
    from ddpdoctor.model.consistency import Stream
    from ddpdoctor.model.replica_records import StreamKey

MAX_ROUNDS = 128
"""How often one call of ``compare`` reads a few points of each rank. Our choice: enough for all files of a stream."""
MAX_REASONS = 8
"""How many unreadable files we keep the reason for."""


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
        """Compare what was written since the last call; return whether a kind of tensor differs for the first time.

        ``writers`` are the processes whose files count. A process that is no longer listed keeps its last state.
        """
        self._writers |= {(writer.pid, writer.ticks): writer for writer in writers}
        known = self._count_differences()
        full = {key: paired.oldest_of_full() for key, paired in self._streams.items()}
        self._read(closing=False)
        for key, oldest in full.items():
            paired = self._streams.get(key)
            if paired is not None and oldest is not None and paired.oldest_of_full() == oldest:
                paired.give_up_waiting()
                paired.settle(others_may_come=False)
        return self._count_differences() > known

    def close(self) -> Consistency:
        """Compare all points that two or more ranks wrote, after all processes have stopped writing."""
        self._read(closing=True)
        return self.consistency()

    def consistency(self) -> Consistency:
        """Return the results so far."""
        return Consistency(
            check_every=self._check_every,
            streams=tuple(
                paired.stream(rank for rank in self._ranks.values() if rank in key.members)
                for key, paired in self._streams.items()
            ),
            allowed=self._allowed,
            bytes_written=self._bytes_written(),
            unread=tuple(f"{name}: {why}" for name, why in sorted(self._all_unread().items())[:MAX_REASONS]),
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
        self._open_new()
        for _ in range(MAX_ROUNDS):
            any_read = [paired.read(closing=closing) for paired in self._streams.values()]
            for key, paired in self._streams.items():
                paired.settle(others_may_come=not closing and self._may_come(key))
            if not any(any_read):
                break

    def _may_come(self, key: StreamKey) -> bool:
        """Return whether a living process may be a rank that has not written to this stream yet."""
        missing = set(key.members) - self._streams[key].columns.keys()
        return bool(missing) and any(
            writer.ended_ns is None and (who not in self._ranks or self._ranks[who] in missing)
            for who, writer in self._writers.items()
        )

    def _open_new(self) -> None:
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

    def _paths(self) -> list[Path]:
        """Return the files of the known processes, those of each process in the order of their creation."""
        found = []
        for path in self._folder.glob("*.prints"):
            numbers = path.stem.split("-")
            if len(numbers) == 3 and all(number.isdecimal() for number in numbers):
                pid, ticks, position = map(int, numbers)
                if (pid, ticks) in self._writers:
                    found.append(((pid, ticks, position), path))
        return [path for _, path in sorted(found)]

    def _add(self, source: OpenFile) -> None:
        who = (source.file.pid, source.file.start_ticks)
        writer = self._writers.get(who)
        if writer is None or source.key in self._torn:
            return
        paired = self._streams.get(source.key)
        before = paired.columns.get(source.rank) if paired is not None else None
        if paired is None or (before is not None and _ended_before(before.writer, writer)):
            if self._index is not None:
                self._index.restart(source.key)
            paired = self._streams[source.key] = Paired(source.key, self._index)  # of several jobs, keep the last
        elif before is not None and before.writer != writer:
            self._torn.add(source.key)
            del self._streams[source.key]
            if self._index is not None:
                self._index.restart(source.key)
            self._unread[f"{source.file.pid}"] = f"several processes at a time are rank {source.rank}"
            return
        self._ranks[who] = source.rank
        paired.columns.setdefault(source.rank, RankColumn(writer)).add(source)

    def _all_unread(self) -> dict[str, str]:
        columns = (column for paired in self._streams.values() for column in paired.columns.values())
        return self._unread | dict(column.failed for column in columns if column.failed is not None)

    def _count_differences(self) -> int:
        return sum(len(paired.seen.differences) for paired in self._streams.values())

    def _bytes_written(self) -> int:
        """Return the size of what the busiest rank wrote."""
        by_rank: defaultdict[int, int] = defaultdict(int)
        for paired in self._streams.values():
            for rank, column in paired.columns.items():
                by_rank[rank] += column.bytes_written
        return max(by_rank.values(), default=0)


def _ended_before(earlier: Writer, later: Writer) -> bool:
    return earlier.ended_ns is not None and earlier.ended_ns <= later.began_ns
