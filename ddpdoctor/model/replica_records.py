"""The messages between nodes about their replicas: digests every few seconds, contents only on request.

Contents are 16 bytes per tensor, as hexadecimal digits. Points in time are numbered by their stream's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import Stream, StreamClock, TensorRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRoot:
    """A digest of one stream on a node's ranks, over a range of points in time."""

    stream: str
    """Name of the stream, equal on all nodes."""
    ranks: tuple[int, ...]
    """The ranks of the node that recorded it."""
    since: int
    """The range starts after this point."""
    upto: int
    """The last point of the range."""
    root: str
    """Equal if the numbers and contents are equal."""
    random: str = ""
    """Equal if random states are equal; empty if the node's own ranks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideKept:
    """Ranks of a node that had the same contents at one point in time."""

    ranks: tuple[int, ...]
    table: int
    """Index into the tables of ``StreamKept``, which list the tensors."""
    fingerprints: str = field(metadata={"json": "prints"})
    texts: tuple[str, ...]
    """One per rank: the ``Values`` that it recorded, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKept:
    """The contents on a node's ranks at one point in time."""

    number: int
    sides: tuple[SideKept, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKey:
    """What records of several ranks must share to be compared."""

    clock: StreamClock
    group: str
    members: tuple[int, ...]
    """Ranks of the group, because groups of different ranks may share a name."""
    model: int
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKept(StreamKey):
    """The last points of one stream, not yet compared with those of other nodes."""

    name: str
    """The same as ``StreamRoot.stream``."""
    tables: tuple[tuple[TensorRow, ...], ...]
    points: tuple[StepKept, ...] = field(metadata={"json": "moments"})
    found: Stream
    """The result of the comparison so far, within one node or over all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStreams:
    """All that a node keeps for comparison in one attempt."""

    streams: tuple[StreamKept, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RootsReport:
    """Each node sends this to the first node every few seconds."""

    roots: tuple[StreamRoot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootsRequest:
    """The first node sends this to all others every few seconds."""

    turn: int = 0
    """How often contents were requested."""
    wanted: tuple[str, ...] = ()
    """The streams whose contents are requested."""
    settled: dict[str, int] = field(default_factory=dict)
    """By stream: the last point whose contents are no longer needed."""
