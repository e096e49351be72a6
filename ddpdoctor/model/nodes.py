"""The nodes that one wrapped job runs on, as the ``wrap`` that writes the report sees them.

A member is one ``ddpdoctor wrap``: one a node under torchrun, one a rank where each task becomes a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Presence(str, Enum):
    """How far a member has come."""

    HERE = "here"
    """It was heard a moment ago; or it is the one that reports."""
    LEFT = "left"
    """It said that it ends, with a status."""
    SILENT = "silent"
    """It was heard, and then no more, without a word."""
    ABSENT = "absent"
    """It never came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """One member of the job, as it was seen. Times are CLOCK_MONOTONIC of the node that reports."""

    number: int
    host: str
    """Empty where it never came and nobody said its name."""
    presence: Presence
    heard_ns: int | None = None
    """When it was last heard."""
    status: int | None = None
    """Of its launcher, where it left."""
    clock_offset_ns: int | None = None
    """Its CLOCK_MONOTONIC less that of the node that reports."""
    clock_error_ns: int | None = None
    """Half of the shortest round trip."""
    wall_offset_s: float | None = None
    gathered: bool = False
    """What it recorded is among the facts."""
    ranks: tuple[int, ...] = ()
    """Its ranks of the last attempt, as it said or as its records hold; empty: it never told."""
    why: str = ""
    """Why it is not there, as far as it was found out: a phrase, as of an attempt to connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    """All members of a job, by number."""

    expected: int
    """How many the launch was told of; the fewest, of an elastic job."""
    own: int
    """The one whose view this is."""
    nodes: tuple[NodeSeen, ...]
    of_ranks: bool = False
    """Each member is one rank that the batch system started. Else a launcher brings them together before it starts
    ranks, so that a node of which nothing was heard has come where ranks run here."""
    alone_since_ns: int | None = None
    """Since when this view is of one node alone: nothing was heard of the others for the limit."""
