"""Compares the replicas of all nodes by root hashes, and by fingerprints for the points where the hashes differ."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprint_compare import Comparer, StreamSeen
from ddpdoctor.collect.fingerprint_files import BEFORE_ALL, DAMAGED, Points, RowsRead, pack_stream, unpack_points
from ddpdoctor.collect.run_files import attempt_name, load
from ddpdoctor.model.consistency import Consistency, NodeStreams, RootsRequest, Stream, StreamKept, Values, What

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ddpdoctor.collect.fingerprint_files import NodeIndex, StreamIndex, Writer, Written
    from ddpdoctor.model.consistency import StreamRoot
    from ddpdoctor.model.facts import Run

FIRST_REST_S = 2.0
LONGEST_REST_S = 300.0  # the pause doubles up to this; our choice: replicas that differ usually stay so
ANSWER_LIMIT_S = 10.0  # our choice: a node that is silent for this long is treated as gone
COMPARISON = "consistency"  # stem of the file with the comparison of this host's ranks
MAX_NUMBER = 2**62  # higher than the number of any point
POINTS, JOINT = "moments", "joint"  # stems of files: a node's points, the first node's comparison of all
_identity = attrgetter("clock", "group", "model", "optimizer")


@dataclass(slots=True, kw_only=True)
class JointStream:
    """One stream on all nodes, as the first node knows it."""

    own: StreamIndex
    found: StreamSeen
    reported: dict[int, StreamRoot] = field(default_factory=dict)  # the last report of each other node
    equal: dict[int, int] = field(default_factory=dict)  # by node, the last point that is equal or was compared
    same_random: bool = True
    compared_upto: int = BEFORE_ALL
    received: dict[int, Points] = field(default_factory=dict)
    asked_s: float | None = None  # when we asked for contents; None if we are not waiting for any
    rests_until_s: float = 0.0
    rest_s: float = FIRST_REST_S

    def compare_new(self, now_s: float) -> bool:
        """Compare what this node has written since; return whether a kind of tensor differs for the first time."""
        for member in self.reported:
            self.judge(member, now_s)
        if self.asked_s is not None:
            is_late = now_s - self.asked_s > ANSWER_LIMIT_S
            has_all = self.reported.keys() <= self.received.keys()
            if not self.received or not (is_late or has_all):
                return False
            any_news = False
            lasts = [max(points) for points in self.received.values() if points]
            if lasts:
                upto = min(self.own.upto, *lasts)
                own = {kept.number: dict(kept.seen) for kept in self.own.points}
                nodes = [own, *self.received.values()]
                any_news = compare_points(self.found, nodes, range(self.compared_upto + 1, upto + 1))
                self.equal |= {member: max(upto, self.equal.get(member, BEFORE_ALL)) for member in self.received}
                self._settle(upto)
            self.asked_s, self.received = None, {}
            self.rests_until_s = now_s + self.rest_s
            self.rest_s = min(self.rest_s * 2, LONGEST_REST_S)
            return any_news
        if self.reported and self.ranks().issuperset(self.own.key.members):
            # These points are equal on all nodes, so comparing this node's ranks is enough.
            upto = min(self.equal.get(member, BEFORE_ALL) for member in self.reported)
            for kept in self.own.points:
                if self.compared_upto < kept.number <= upto:
                    self.found.compare(kept.number, kept.seen)
            self._settle(upto)
        return False

    def ranks(self) -> set[int]:
        return self.own.ranks.union(*(reported.ranks for reported in self.reported.values()))

    def judge(self, member: int, now_s: float) -> None:
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
        self._own = own
        self._rows_read = RowsRead(allowed)
        self._streams: dict[str, JointStream] = {}
        self._wanted: set[str] = set()
        self.turn = 0  # how often we asked for contents
        self.unread: dict[int, str] = {}  # by node, why its contents could not be read

    def hear(self, member: int, reported: Iterable[StreamRoot], now_s: float) -> None:
        """Store and compare another node's reports about its streams."""
        for root in reported:
            stream = self._stream(root.stream)
            if stream is not None:
                stream.reported[member] = root
                stream.judge(member, now_s)

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
                stream.received[member] = {}
                try:
                    stream.received[member] = unpack_points(kept, self._rows_read)
                except DAMAGED as error:
                    self.unread[member] = str(error) or type(error).__name__

    def found(self) -> NodeStreams:
        streams = []
        for joint in self._streams.values():
            if joint.reported:
                stream = joint.found.stream(())
                same_random = stream.same_random * joint.same_random
                stream = replace(stream, ranks=tuple(sorted(joint.ranks())), same_random=same_random)
                streams.append(replace(pack_stream(joint.own, stream), points=(), tables=()))
        return NodeStreams(streams=tuple(streams))

    def _stream(self, name: str) -> JointStream | None:
        own = self._own.streams.get(name)
        if own is None:
            self._streams.pop(name, None)
            return None
        if name not in self._streams:
            self._streams[name] = JointStream(own=own, found=StreamSeen(own.key))
        return self._streams[name]


def read_consistency(folder: Path, run: Run, attempt: int | None, writers: Iterable[Writer]) -> Consistency | None:
    """Return the saved comparison, or compare if the watcher was killed; None for a run of an older version."""
    if run.check_every is None or run.check_every < 0:
        return None
    if run.check_every == 0:
        return Consistency(check_every=0)
    saved = load(Consistency, folder / attempt_name(COMPARISON, attempt))
    if saved is not None:
        return saved
    comparer = Comparer(folder / "prints", check_every=run.check_every, allowed=run.allow_different)
    try:
        comparer.compare(writers)
        return comparer.close()
    except Exception as error:  # noqa: BLE001 - damaged files must not hide the other facts of the job
        return Consistency(check_every=run.check_every, unread=(f"what ranks wrote: {type(error).__name__}: {error}",))


def read_points(path: Path) -> NodeStreams:
    """Return the points in a file, or none if it is missing, too large or damaged."""
    return load(NodeStreams, path) or NodeStreams()


def unite_consistency(
    folder: Path, attempt: int | None, nodes: Sequence[tuple[Path, int | None]], found: Sequence[Consistency | None]
) -> Consistency | None:
    """Return the comparison of the replicas of all nodes; ``found`` has each node's own, this node's first."""
    own, known = found[0], [comparison for comparison in found if comparison is not None]
    joint = {stream.name: stream for stream in read_points(folder / attempt_name(JOINT, attempt)).streams}
    if own is None or (len(known) < 2 and not joint):
        return own
    kept: dict[str, list[StreamKept]] = {}
    for where, number in ((folder, attempt), *nodes):
        of_node: dict[str, StreamKept] = {}
        for stream in read_points(where / attempt_name(POINTS, number)).streams:
            of_node.setdefault(stream.name, stream)
        for name, stream in of_node.items():
            kept.setdefault(name, []).append(stream)
    joined = [_join(joint.get(name), of_nodes, own.allowed) for name, of_nodes in kept.items()]
    streams = [stream for stream in joined if stream.compared]
    # A node's own view of a stream, unless the joint streams include it
    covered = [(_identity(stream), {*stream.ranks, *stream.unpaired}) for stream in streams]
    alone = [
        stream
        for node in known
        for stream in node.streams
        if not any(
            _identity(stream) == key and ranks.issuperset({*stream.ranks, *stream.unpaired}) for key, ranks in covered
        )
    ]
    return replace(
        own,
        streams=(*streams, *alone),
        bytes_written=max(node.bytes_written for node in known),
        unread=tuple(dict.fromkeys(why for node in known for why in node.unread)),
    )


def _join(joint: StreamKept | None, nodes: Sequence[StreamKept], allowed: tuple[str, ...]) -> Stream:
    """Return one stream over all nodes: the joint result so far, continued with the points that nodes still keep."""
    before = joint.found if joint is not None else None
    since = BEFORE_ALL if before is None or before.last_number is None else before.last_number
    seen = StreamSeen(nodes[0])
    rows_read = RowsRead(allowed)
    points = []
    for node in nodes:
        with contextlib.suppress(*DAMAGED):
            points.append(unpack_points(node, rows_read))
    compare_points(seen, points, range(since + 1, MAX_NUMBER))
    whole = after = seen.stream(())
    if before is not None:
        found = {difference.what: difference for difference in before.differences}
        for difference in after.differences:
            # Its last equal point may be in the earlier range.
            earlier = before.last_number if difference.what in before.kinds else None
            last_equal = earlier if difference.last_equal is None else difference.last_equal
            found.setdefault(difference.what, replace(difference, last_equal=last_equal))
        whole = replace(
            before, ranks=tuple(sorted({*before.ranks, *after.ranks})), compared=before.compared + after.compared,
            last_number=before.last_number if after.last_number is None else after.last_number,
            tensors=after.tensors or before.tensors,
            kinds=tuple(what for what in What if what in before.kinds or what in after.kinds),
            differences=tuple(found.values()), values=_united_values([before, after]),
            same_random=before.same_random + after.same_random, every=after.every,
        )  # fmt: skip
    # Add what each node knows about its own ranks
    own = [node.found for node in nodes]
    written = {rank for stream in own for rank in stream.ranks}
    compared = [stream for stream in own if stream.compared]
    never_changed = all(stream.unchanged == stream.compared - 1 for stream in compared)
    unchanged = min((stream.unchanged for stream in compared), default=0)
    differences = {difference.what: difference for difference in whole.differences}
    for difference in (difference for stream in own if len(stream.ranks) > 1 for difference in stream.differences):
        if difference.what not in differences or difference.number < differences[difference.what].number:
            differences[difference.what] = difference
    return replace(
        whole,
        differences=tuple(differences[what] for what in What if what in differences),
        values=_united_values([whole, *own]),
        unchanged=max(whole.compared - 1, 0) if never_changed else min(unchanged, max(whole.compared - 1, 0)),
        unpaired=tuple(sorted(written - set(whole.ranks))),
    )


def _united_values(streams: Iterable[Stream]) -> tuple[tuple[int, tuple[Values, ...]], ...]:
    by_number: dict[int, dict[int, Values]] = {}
    for stream in streams:
        for number, values in stream.values:
            by_number.setdefault(number, {}).update({value.rank: value for value in values})
    return tuple(
        (number, tuple(value for _, value in sorted(by_rank.items()))) for number, by_rank in sorted(by_number.items())
    )
