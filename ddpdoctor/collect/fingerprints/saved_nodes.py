"""Combines the comparisons of several nodes, from the run folder of the reporting node."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprints.across_nodes import compare_points
from ddpdoctor.collect.fingerprints.batches import Points, unpack_points
from ddpdoctor.collect.fingerprints.columns import DAMAGED
from ddpdoctor.collect.fingerprints.index import BEFORE_ALL
from ddpdoctor.collect.fingerprints.streams import StreamSeen
from ddpdoctor.collect.fingerprints.tables import RowsRead
from ddpdoctor.collect.run.evidence import load
from ddpdoctor.model.consistency import Consistency, Difference, Stream, Values, What
from ddpdoctor.model.replica_records import NodeStreams, StreamKept
from ddpdoctor.model.run import attempt_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MAX_NUMBER = 2**62
"""Higher than the number of any point."""
POINTS, JOINT = "moments", "joint"
"""Stems of the files with a node's points, and with the first node's comparison of all nodes."""


def read_points(path: Path) -> NodeStreams:
    """Return the points in a file, or none if it is missing, too large or damaged."""
    return load(NodeStreams, path) or NodeStreams()


def unite_consistency(
    folder: Path, attempt: int | None, nodes: Sequence[tuple[Path, int | None]], found: Sequence[Consistency | None]
) -> Consistency | None:
    """Return the comparison of the replicas of all nodes.

    ``folder`` and ``attempt`` belong to the reporting node, ``nodes`` holds the same pair for each other node, and
    ``found`` holds each node's own comparison, beginning with the reporting node's.
    """
    own, known = found[0], [one for one in found if one is not None]
    joint = {one.name: one for one in read_points(folder / attempt_name(JOINT, attempt)).streams}
    if own is None or (len(known) < 2 and not joint):
        return own
    kept = [read_points(where / attempt_name(POINTS, number)) for where, number in ((folder, attempt), *nodes)]
    shared = {one.name: one for node in kept for one in node.streams}
    joined = [_join(joint.get(name), [_named(node, name) for node in kept], own.allowed) for name in shared]
    streams = [stream for stream in joined if stream.compared]
    alone = [stream for one in known for stream in one.streams if not _is_covered(stream, streams)]
    return replace(
        own,
        streams=(*streams, *alone),
        bytes_written=max(one.bytes_written for one in known),
        unread=tuple(dict.fromkeys(why for one in known for why in one.unread)),
    )


def _join(joint: StreamKept | None, nodes: Sequence[StreamKept | None], allowed: tuple[str, ...]) -> Stream:
    """Return one stream over all nodes: the joint result so far, continued with the points that nodes still keep."""
    there = [node for node in nodes if node is not None]
    before = joint.found if joint is not None else None
    since = BEFORE_ALL if before is None or before.last_number is None else before.last_number
    seen = StreamSeen(there[0])
    rows_read = RowsRead(allowed)
    compare_points(seen, [_unpack(node, rows_read) for node in there], range(since + 1, MAX_NUMBER))
    stream = seen.stream(())
    whole = stream if before is None else _continued(before, stream)
    return _with_own(whole, [node.found for node in there])


def _unpack(kept: StreamKept, rows_read: RowsRead) -> Points:
    try:
        return unpack_points(kept, rows_read)
    except DAMAGED:
        return {}


def _continued(before: Stream, after: Stream) -> Stream:
    """Return the result of two consecutive ranges of points."""
    known = {one.what for one in before.differences}
    later = tuple(_since(before, one) for one in after.differences if one.what not in known)
    return replace(
        before,
        ranks=tuple(sorted({*before.ranks, *after.ranks})),
        compared=before.compared + after.compared,
        last_number=before.last_number if after.last_number is None else after.last_number,
        tensors=after.tensors or before.tensors,
        kinds=tuple(what for what in What if what in before.kinds or what in after.kinds),
        differences=(*before.differences, *later),
        values=_united_values([before, after]),
        same_random=before.same_random + after.same_random,
        every=after.every,
    )


def _since(before: Stream, difference: Difference) -> Difference:
    """Return a difference with the last equal point before it, which may be in the earlier range."""
    if difference.last_equal is not None or difference.what not in before.kinds:
        return difference
    return replace(difference, last_equal=before.last_number)


def _with_own(whole: Stream, own: Sequence[Stream]) -> Stream:
    """Add what each node knows about its own ranks."""
    written = {rank for one in own for rank in one.ranks}
    never_changed = all(one.unchanged == one.compared - 1 for one in own if one.compared)
    unchanged = min((one.unchanged for one in own if one.compared), default=0)
    differences = {one.what: one for one in whole.differences}
    for one in (difference for stream in own if len(stream.ranks) > 1 for difference in stream.differences):
        if one.what not in differences or one.number < differences[one.what].number:
            differences[one.what] = one
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
            by_number.setdefault(number, {}).update({one.rank: one for one in values})
    return tuple(
        (number, tuple(one for _, one in sorted(by_rank.items()))) for number, by_rank in sorted(by_number.items())
    )


def _named(node: NodeStreams, name: str) -> StreamKept | None:
    return next((one for one in node.streams if one.name == name), None)


def _identity(stream: Stream) -> tuple[object, ...]:
    return stream.clock, stream.group, stream.model, stream.optimizer, (*stream.ranks, *stream.unpaired)


def _is_covered(stream: Stream, shared: Iterable[Stream]) -> bool:
    """Return whether the joint streams include a node's own view of a stream."""
    mine = {*stream.ranks, *stream.unpaired}
    return any(_identity(one)[:4] == _identity(stream)[:4] and mine <= {*one.ranks, *one.unpaired} for one in shared)
