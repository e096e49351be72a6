"""What nodes tell each other of the states of their replicas: roots again and again, contents only when asked.

Contents are 16 bytes a tensor, as hexadecimal digits. Numbers of moments are those of the stream's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import Stream, StreamClock, TensorRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRoot:
    """What a node's ranks had at all moments of one stream in a range, in a few bytes."""

    stream: str
    """Which; equal on all nodes."""
    ranks: tuple[int, ...]
    """Which ranks of the node wrote them."""
    since: int
    """The moments after this number,"""
    upto: int
    """and up to this one."""
    root: str
    """Equal where numbers and contents are."""
    random: str = ""
    """Equal where random states are; empty where the node's own ranks differ in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideKept:
    """Ranks of a node that had the same at one moment."""

    ranks: tuple[int, ...]
    table: int
    """Which of the tables of ``StreamKept`` its contents are of."""
    prints: str
    texts: tuple[str, ...]
    """What each of them wrote beside it, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentKept:
    """What a node's ranks had at one moment."""

    number: int
    sides: tuple[SideKept, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKept:
    """The last moments of one stream: those that were not yet compared with the other nodes'."""

    name: str
    """As of ``StreamRoot.stream``."""
    clock: StreamClock
    group: str
    members: tuple[int, ...]
    model: int
    optimizer: int
    tables: tuple[tuple[TensorRow, ...], ...]
    moments: tuple[MomentKept, ...]
    found: Stream
    """What comparing has found so far: among the ranks of one node, which may be one rank, or among those of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMoments:
    """All that a node keeps for the others, of one attempt."""

    streams: tuple[StreamKept, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RootsTold:
    """What a node says every few seconds."""

    roots: tuple[StreamRoot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootsHeard:
    """What the first node says to all others every few seconds."""

    turn: int = 0
    """Counts how often contents were asked for."""
    wanted: tuple[str, ...] = ()
    """The streams whose contents are asked for."""
    settled: dict[str, int] = field(default_factory=dict)
    """By stream up to which moment nobody needs to keep contents."""
