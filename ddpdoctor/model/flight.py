"""What torch's flight recorder dumped of one rank: the calls of each group, in columns. No judgement, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    from ddpdoctor.model.evidence import Spot
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightCall:
    """What equal entries share. Equal ones of all ranks are one object, so that they are compared by identity."""

    op: str
    """torch's name: "all_reduce", "reduce_scatter_tensor", "send"."""
    shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    peer: int | None = None
    """For a send or receive: the other rank within the group; None also for any source."""
    point_to_point: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightGroup:
    """The entries of one process group, oldest first. All columns have one item an entry."""

    name: str
    desc: str
    members: tuple[int, ...] | None
    """Global ranks in the order of their group ranks, or None if the dump does not say."""
    backend: str
    calls: tuple[FlightCall, ...]
    """The different calls; ``which`` counts in here."""
    which: array[int]
    seq: array[int]
    """``collective_seq_id``; a send or receive repeats the number before it."""
    state: bytes
    """One letter an entry: s scheduled, r running (started), c completed, u unknown (retired, but never completed)."""
    created_ns: array[int]
    pending: tuple[int, ...]
    """Indexes of the entries that have not completed, oldest first."""
    frames: dict[int, tuple[Frame, ...]]
    """The stacks of the first pending entry and of the last entry, outermost first, by index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """One dump."""

    rank: int | None
    """From the file's name, because the content does not say."""
    spot: Spot
    version: str
    """"2.10"."""
    groups: tuple[FlightGroup, ...]
    world_size: int | None
    """The size of the default group, if the dump has one."""
    wrapped: bool
    """The ring was full: older entries are lost."""
    first_ns: int | None
    """Wall clock of the oldest and of the newest entry."""
    last_ns: int | None
    written_at: float | None
    """The file's modification time, in seconds since the epoch."""
    enqueued: dict[str, int] | None = None
    """The last number enqueued in each group by its name, from ``pg_status``, if the dump has it."""
    completed: dict[str, int] | None = None
    damaged: str = ""
    """What is wrong with it, such as "cut off"; empty: nothing."""
