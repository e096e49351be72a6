"""What nodes send each other about their replicas: roots every few seconds, contents only on request.

Contents are 16 bytes a tensor, as hexadecimal digits. Points in time have the numbers of their stream's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import Stream, StreamClock, TensorRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRoot:
    """A digest of what a node's ranks had in one stream, over a range of points in time."""

    stream: str
    """Which; equal on all nodes."""
    ranks: tuple[int, ...]
    """Which ranks of the node wrote them."""
    since: int
    """The first point is the one after this number."""
    upto: int
    """The last point."""
    root: str
    """Equal where numbers and contents are equal."""
    random: str = ""
    """Equal where random states are equal; empty where the node's own ranks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideKept:
    """Ranks of a node that had the same contents at one point in time."""

    ranks: tuple[int, ...]
    table: int
    """Index into the tables of ``StreamKept``: which tensors the contents are of."""
    prints: str
    texts: tuple[str, ...]
    """What each of them wrote beside it, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKept:
    """What a node's ranks had at one point in time."""

    number: int
    sides: tuple[SideKept, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKept:
    """The last points of one stream, which were not yet compared with those of other nodes."""

    name: str
    """The same as ``StreamRoot.stream``."""
    clock: StreamClock
    group: str
    members: tuple[int, ...]
    model: int
    optimizer: int
    tables: tuple[tuple[TensorRow, ...], ...]
    moments: tuple[StepKept, ...]
    found: Stream
    """What the comparison has found so far, within one node or over all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStreams:
    """All that a node keeps for the others in one attempt."""

    streams: tuple[StreamKept, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RootsReport:
    """What a node sends to the first node every few seconds."""

    roots: tuple[StreamRoot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootsRequest:
    """What the first node sends to all others every few seconds."""

    turn: int = 0
    """How often contents were asked for."""
    wanted: tuple[str, ...] = ()
    """The streams whose contents are asked for."""
    settled: dict[str, int] = field(default_factory=dict)
    """By stream: the last point whose contents nobody needs to keep."""
