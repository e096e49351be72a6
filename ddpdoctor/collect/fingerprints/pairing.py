"""Pairs the ranks' records of one stream by the number of their point, because ranks can be at different points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprints.streams import StreamSeen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.collect.fingerprints.columns import RankColumn
    from ddpdoctor.collect.fingerprints.differences import Written
    from ddpdoctor.collect.fingerprints.index import NodeIndex
    from ddpdoctor.model.consistency import Stream
    from ddpdoctor.model.replica_records import StreamKey

MAX_AHEAD = 8
"""How many points of a rank we keep until the others have written theirs; the rest wait in its file. Our choice: ranks
that reduce gradients together are at most one step apart, so a rank that is further behind does not take part."""


class Paired:
    """One stream: the points that wait for more ranks, and the results for all earlier points."""

    def __init__(self, key: StreamKey, index: NodeIndex | None = None) -> None:
        """Begin without ranks; ``index`` keeps all points for other nodes."""
        self.key = key
        self._index = index
        self.seen = StreamSeen(key)
        self.columns: dict[int, RankColumn] = {}
        self._pending: dict[int, dict[int, Written]] = {}
        self._settled = -1
        self._left: set[int] = set()
        """Ranks that we do not wait for until they write again."""
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
        """Compare the points that have all their ranks.

        ``others_may_come``: a rank that has not written to this stream yet may still do so.
        """
        if others_may_come and self._waits_for_new:
            return
        for number in sorted(self._pending):
            if not all(self._needs_no_more(rank, number) for rank in self.columns):
                break
            self._compare(number)

    def stream(self, writers: Iterable[int]) -> Stream:
        """Return the result for this node's ranks, which is empty if fewer than two ranks were compared."""
        own = self.seen if len(self.seen.ranks) > 1 else StreamSeen(self.key)
        return own.stream(writers)

    def oldest_of_full(self) -> int | None:
        """Return the oldest waiting point if a rank has no room for another, else None."""
        return min(self._pending) if any(self._space(rank) <= 0 for rank in self.columns) else None

    def give_up_waiting(self) -> None:
        """Stop waiting for the ranks that the oldest point lacks."""
        oldest = min(self._pending)
        self._waits_for_new = False
        self._left |= {rank for rank in self.columns if not self._needs_no_more(rank, oldest)}

    def _space(self, rank: int) -> int:
        return MAX_AHEAD - sum(rank in seen for seen in self._pending.values())

    def _needs_no_more(self, rank: int, number: int) -> bool:
        column = self.columns[rank]
        return column.latest >= number or column.is_over or rank in self._left

    def _compare(self, number: int) -> None:
        seen = self._pending.pop(number)
        self._settled = number
        if self._index is not None:
            self._index.note(self.key, number, seen)
        if len(seen) > 1 or (self._index is not None and len(self.columns) == 1):
            self.seen.compare(number, seen)
