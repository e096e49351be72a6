"""Keeps what a node's ranks wrote until it is known whether other nodes have the same."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprints.differences import Written
from ddpdoctor.collect.fingerprints.tables import ROOT_SIZE, root_of
from ddpdoctor.model.replica_records import StreamRoot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ddpdoctor.collect.fingerprints.tables import StreamKey

MAX_KEPT_BYTES = 16 * 2**20
"""Of one stream. Ours: nodes compare roots every few seconds, and eight points of a model of 100,000 tensors fit."""
MAX_KEPT_POINTS = 4096
STREAM_SIZE = 8
BEFORE_ALL = -1
"""Points are numbered from 0."""
_RANK_BYTES = 1024
"""About what the text beside the fingerprints takes; kept by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One point of one stream, as the ranks of this node have it."""

    number: int
    seen: Mapping[int, Written]
    root: bytes
    random: bytes
    """Of the random state, where all ranks of the node have the same; else empty."""
    size_bytes: int


class StreamIndex:
    """The points of one stream, in their order."""

    def __init__(self, key: StreamKey, name: str) -> None:
        """Begin without points."""
        self.key = key
        self.name = name
        self.moments: deque[Kept] = deque()
        self.since = BEFORE_ALL
        """Up to this number points are forgotten."""
        self.upto = BEFORE_ALL
        """The last one that was written."""
        self.ranks: set[int] = set()
        self._size_bytes = 0

    def note(self, number: int, seen: Mapping[int, Written]) -> None:
        """Keep a point; the oldest is forgotten where there are too many."""
        kept = _kept(number, seen)
        self.moments.append(kept)
        self.upto = number
        self.ranks.update(seen)
        self._size_bytes += kept.size_bytes
        while len(self.moments) > MAX_KEPT_POINTS or (self._size_bytes > MAX_KEPT_BYTES and len(self.moments) > 1):
            self._forget_oldest()

    def forget(self, upto: int) -> None:
        """Forget the points up to a number: the other nodes have the same."""
        while self.moments and self.moments[0].number <= upto:
            self._forget_oldest()
        self.since = max(self.since, upto)

    def root(self, since: int, upto: int) -> tuple[str, str]:
        """Return what is equal where nodes have the same in a range, and the same of their random states."""
        contents, random = blake2b(digest_size=ROOT_SIZE), blake2b(digest_size=STREAM_SIZE)
        is_one_state = True
        for kept in self.moments:
            if since < kept.number <= upto:
                contents.update(kept.number.to_bytes(8, "little") + kept.root)
                random.update(kept.random)
                is_one_state = is_one_state and kept.random != b""
        return contents.hexdigest(), random.hexdigest() if is_one_state else ""

    def report(self) -> StreamRoot:
        """Return what the other nodes are to know of all that is kept."""
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
        gone = self.moments.popleft()
        self._size_bytes -= gone.size_bytes
        self.since = max(self.since, gone.number)


class NodeIndex:
    """All streams of one attempt, on one node."""

    def __init__(self, attempt: int = 0) -> None:
        """Begin without streams. ``attempt`` is a number that all nodes give the same attempt."""
        self.streams: dict[str, StreamIndex] = {}
        self._attempt = attempt
        self._by_key: dict[StreamKey, StreamIndex] = {}
        self._begun: dict[StreamKey, int] = {}
        """How often each was begun: what an earlier job of the same ranks wrote is never held against the next."""

    def note(self, key: StreamKey, number: int, seen: Mapping[int, Written]) -> None:
        """Keep what ranks of this node wrote at one point."""
        index = self._by_key.get(key)
        if index is None:
            index = self._by_key[key] = StreamIndex(key, self._name(key))
            self.streams[index.name] = index
        index.note(number, seen)

    def restart(self, key: StreamKey) -> None:
        """Begin a stream, and forget what another job of the same ranks wrote of it."""
        self._begun[key] = self._begun.get(key, 0) + 1
        gone = self._by_key.pop(key, None)
        if gone is not None:
            del self.streams[gone.name]

    def shared(self) -> list[StreamIndex]:
        """Return the streams that ranks of other nodes write too."""
        return [one for one in self.streams.values() if not one.ranks.issuperset(one.key.members)]

    def report(self) -> tuple[StreamRoot, ...]:
        """Return what the other nodes are to know."""
        return tuple(one.report() for one in self.shared() if one.moments)

    def _name(self, key: StreamKey) -> str:
        which = repr((self._attempt, self._begun.get(key, 0), key))
        return blake2b(which.encode("utf-8", "replace"), digest_size=STREAM_SIZE).hexdigest()


def _kept(number: int, seen: Mapping[int, Written]) -> Kept:
    shared: dict[tuple[int, bytes], Written] = {}
    those = {}
    for rank in sorted(seen):
        one = seen[rank]
        same = shared.setdefault((id(one.rows), one.prints), one)
        those[rank] = Written(same.rows, same.prints, one.text)
    random = {str(one.text.get("random") or "") for one in seen.values()}
    return Kept(
        number=number,
        seen=those,
        root=_root(shared.values(), those),
        random=random.pop().encode() if len(random) == 1 else b"",
        size_bytes=sum(len(one.prints) for one in shared.values()) + _RANK_BYTES * len(those),
    )


def _root(sides: Collection[Written], ranks: Iterable[int]) -> bytes:
    """Return what is equal where all ranks of nodes are; of ranks that differ, what no other node can have."""
    roots = b"".join(root_of(one.rows, one.prints) for one in sides)
    if len(sides) == 1:
        return roots
    return blake2b(roots + repr(sorted(ranks)).encode(), digest_size=ROOT_SIZE).digest()
