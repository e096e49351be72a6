"""Keeps what this node's ranks wrote until we know whether other nodes have the same."""

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

    from ddpdoctor.model.replica_records import StreamKey

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
        root=_root(shared.values(), those),
        random=random.pop().encode() if len(random) == 1 else b"",
        size_bytes=sum(len(one.fingerprints) for one in shared.values()) + _RANK_BYTES * len(those),
    )


def _root(sides: Collection[Written], ranks: Iterable[int]) -> bytes:
    """Return a hash that nodes share if all their ranks are equal; if ranks here differ, it is unique to this node."""
    roots = b"".join(root_of(one.rows, one.fingerprints) for one in sides)
    if len(sides) == 1:
        return roots
    return blake2b(roots + repr(sorted(ranks)).encode(), digest_size=ROOT_SIZE).digest()
