"""Compares the replicas of all nodes by root hashes, and by fingerprints for the points where the hashes differ."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprints.batches import pack_stream, unpack_points
from ddpdoctor.collect.fingerprints.columns import DAMAGED
from ddpdoctor.collect.fingerprints.index import BEFORE_ALL
from ddpdoctor.collect.fingerprints.streams import StreamSeen
from ddpdoctor.collect.fingerprints.tables import RowsRead
from ddpdoctor.model.replica_records import NodeStreams, RootsRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.collect.fingerprints.batches import Points
    from ddpdoctor.collect.fingerprints.differences import Written
    from ddpdoctor.collect.fingerprints.index import NodeIndex, StreamIndex
    from ddpdoctor.model.replica_records import StreamKept, StreamRoot

FIRST_REST_S = 2.0
LONGEST_REST_S = 300.0
"""The pause before we ask for contents again doubles up to this. Our choice: replicas that differ usually stay so."""
ANSWER_LIMIT_S = 10.0
"""How long we wait for contents. Our choice: a node that is silent for this long is treated as gone."""


@dataclass(slots=True, kw_only=True)
class JointStream:
    """One stream on all nodes, as the first node knows it."""

    own: StreamIndex
    found: StreamSeen
    reported: dict[int, StreamRoot] = field(default_factory=dict)
    """The last report of each other node."""
    equal: dict[int, int] = field(default_factory=dict)
    """By node, the last point that is known to be equal or was compared."""
    same_random: bool = True
    compared_upto: int = BEFORE_ALL
    received: dict[int, Points] = field(default_factory=dict)
    asked_s: float | None = None
    """When we asked for contents; None if we are not waiting for any."""
    rests_until_s: float = 0.0
    rest_s: float = FIRST_REST_S

    def hear(self, member: int, reported: StreamRoot, now_s: float) -> None:
        """Store another node's report and compare it."""
        self.reported[member] = reported
        self._judge(member, now_s)

    def compare_new(self, now_s: float) -> bool:
        """Compare what this node has written since; return whether a kind of tensor differs for the first time."""
        for member in self.reported:
            self._judge(member, now_s)
        if self.asked_s is not None:
            is_late = now_s - self.asked_s > ANSWER_LIMIT_S
            return self._compare_contents(now_s) if self.received and (is_late or self._has_all()) else False
        if self._is_complete():
            self._pass(min(self.equal.get(member, BEFORE_ALL) for member in self.reported))
        return False

    def answered(self, member: int, points: Points) -> None:
        """Store the contents that another node has sent."""
        self.received[member] = points

    def compare(self, theirs: Iterable[Points], upto: int) -> bool:
        """Compare contents up to a point; return whether a kind of tensor differs for the first time."""
        own = {kept.number: dict(kept.seen) for kept in self.own.points}
        return compare_points(self.found, [own, *theirs], range(self.compared_upto + 1, upto + 1))

    def ranks(self) -> set[int]:
        """Return the ranks that any node has reported."""
        return self.own.ranks.union(*(reported.ranks for reported in self.reported.values()))

    def _judge(self, member: int, now_s: float) -> None:
        """Compare another node's root with ours, once our ranks have written the same points."""
        reported = self.reported[member]
        if reported.upto > self.own.upto or reported.upto <= self.equal.get(member, BEFORE_ALL):
            return
        if self.asked_s is not None or now_s < self.rests_until_s:
            return
        if reported.since < self.compared_upto:
            return  # it does not yet know how far all nodes are; its next report starts there
        root, random = self.own.root(reported.since, reported.upto)
        if root == reported.root and self.own.since <= reported.since:
            self.equal[member] = reported.upto
            self.same_random = self.same_random and random == reported.random != ""
        else:
            self.asked_s = now_s
            self.received = {}

    def _is_complete(self) -> bool:
        """Return whether all ranks of the group were reported."""
        return bool(self.reported) and self.ranks().issuperset(self.own.key.members)

    def _has_all(self) -> bool:
        return self.reported.keys() <= self.received.keys()

    def _pass(self, upto: int) -> None:
        """Settle points that are equal on all nodes; comparing this node's ranks is enough."""
        for kept in self.own.points:
            if self.compared_upto < kept.number <= upto:
                self.found.compare(kept.number, kept.seen)
        self._settle(upto)

    def _compare_contents(self, now_s: float) -> bool:
        any_news = False
        lasts = [max(points) for points in self.received.values() if points]
        if lasts:
            upto = min(self.own.upto, *lasts)
            any_news = self.compare(self.received.values(), upto)
            self.equal |= {member: max(upto, self.equal.get(member, BEFORE_ALL)) for member in self.received}
            self._settle(upto)
        self.asked_s, self.received = None, {}
        self.rests_until_s = now_s + self.rest_s
        self.rest_s = min(self.rest_s * 2, LONGEST_REST_S)
        return any_news

    def _settle(self, upto: int) -> None:
        self.compared_upto = max(self.compared_upto, upto)
        self.own.forget(self.compared_upto)


def compare_points(found: StreamSeen, nodes: Iterable[Points], within: range) -> bool:
    """Compare contents point by point; return whether a kind of tensor differs for the first time."""
    by_number: dict[int, dict[int, Written]] = {}
    for points in nodes:
        for number, seen in points.items():
            if number in within:
                by_number.setdefault(number, {}).update(seen)
    any_news = False
    for number in sorted(by_number):
        if len(by_number[number]) > 1:
            any_news |= found.compare(number, by_number[number])
    return any_news


class Joint:
    """The comparison of one attempt over all nodes. It runs on the first node."""

    def __init__(self, own: NodeIndex, allowed: Sequence[str]) -> None:
        """Compare with ``own``, this node's index; tensors whose names match ``allowed`` may differ."""
        self._own = own
        self._rows_read = RowsRead(allowed)
        self._streams: dict[str, JointStream] = {}
        self._wanted: set[str] = set()
        self.turn = 0
        """How often we asked for contents."""
        self.unread: dict[int, str] = {}
        """By node, why its contents could not be read."""

    def hear(self, member: int, reported: Iterable[StreamRoot], now_s: float) -> None:
        """Store and compare another node's reports about its streams."""
        for root in reported:
            stream = self._stream(root.stream)
            if stream is not None:
                stream.hear(member, root, now_s)

    def compare(self, now_s: float) -> bool:
        """Compare what this node has written since; return whether a kind of tensor differs for the first time."""
        any_news = False
        for name in list(self._own.streams):
            stream = self._stream(name)
            if stream is not None:
                any_news |= stream.compare_new(now_s)
        return any_news

    def word(self) -> RootsRequest:
        """Return the message for all other nodes: the streams whose contents we need, and how far each is settled."""
        wanted = tuple(sorted(name for name, stream in self._streams.items() if stream.asked_s is not None))
        self.turn += bool(set(wanted) - self._wanted)
        self._wanted = set(wanted)
        settled = {name: stream.compared_upto for name, stream in self._streams.items() if stream.reported}
        return RootsRequest(turn=self.turn, wanted=wanted, settled=settled)

    def answered(self, member: int, sent: NodeStreams) -> None:
        """Store the contents that another node has sent; damaged ones count as an empty answer."""
        for kept in sent.streams:
            stream = self._stream(kept.name)
            if stream is not None and stream.asked_s is not None:
                stream.answered(member, self._unpack(member, kept))

    def found(self) -> NodeStreams:
        """Return the result over all nodes so far."""
        return NodeStreams(streams=tuple(_found(one) for one in self._streams.values() if one.reported))

    def _unpack(self, member: int, kept: StreamKept) -> Points:
        try:
            return unpack_points(kept, self._rows_read)
        except DAMAGED as error:
            self.unread[member] = str(error) or type(error).__name__
            return {}

    def _stream(self, name: str) -> JointStream | None:
        own = self._own.streams.get(name)
        if own is None:
            self._streams.pop(name, None)
            return None
        if name not in self._streams:
            self._streams[name] = JointStream(own=own, found=StreamSeen(own.key))
        return self._streams[name]


def _found(one: JointStream) -> StreamKept:
    stream = one.found.stream(())
    stream = replace(stream, ranks=tuple(sorted(one.ranks())), same_random=stream.same_random * one.same_random)
    return replace(pack_stream(one.own, stream), points=(), tables=())
