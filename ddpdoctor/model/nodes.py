"""The nodes of a wrapped job, from the view of the ``wrap`` that writes the report.

A member is one ``ddpdoctor wrap`` process: one per node under torchrun, or one per rank if each task becomes a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Presence(str, Enum):
    """Whether a member takes part."""

    HERE = "here"
    """It sent a message recently, or it is the reporting member itself."""
    LEFT = "left"
    """It announced its end, with a status."""
    SILENT = "silent"
    """It stopped sending messages without announcing its end."""
    ABSENT = "absent"
    """It never joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """The state of one member. Times are CLOCK_MONOTONIC of the reporting node."""

    number: int
    host: str
    """Empty if it never joined and its name is unknown."""
    presence: Presence
    heard_ns: int | None = None
    """When its last message arrived."""
    status: int | None = None
    """Exit status of its launcher, if the member left."""
    clock_offset_ns: int | None = None
    """Its CLOCK_MONOTONIC minus that of the reporting node."""
    clock_error_ns: int | None = None
    """Half of the shortest round trip."""
    wall_offset_s: float | None = None
    gathered: bool = False
    """Its records are included in the facts."""
    ranks: tuple[int, ...] = ()
    """Its ranks in the last attempt, from its messages or records; empty: unknown."""
    alive: int | None = None
    """Its ranks that live, from its last message; None: unknown."""
    waits_s: float | None = None
    """The longest time that one of them has been in a call that needs others, or None."""
    why: str = ""
    """A phrase that says why it is missing, for example from an attempt to connect. Empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    """All members of a job, by number."""

    expected: int
    """Number of members at launch; the least number for an elastic job."""
    own: int
    """Number of the member whose view this is."""
    nodes: tuple[NodeSeen, ...]
    of_ranks: bool = False
    """Each member is one rank that the batch system started. If False, a launcher waits for all nodes before it starts
    ranks. Then a node without messages must have joined if ranks run here."""
    alone_since_ns: int | None = None
    """Since when this node has been alone, because no other sent a message within the limit."""
