"""The records that the nodes send to each other.

Keys: ``arrived`` counts those that came; ``hello/N``, ``facts/N``, ``door/N``, ``served/N`` and ``trial/N`` are of the
one that came as number N; ``head``, ``roster`` and ``trials`` of the one that judges. Its goodbye is the verdict. Below
``mesh/`` the mesh has keys of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Check, Finding
    from ddpdoctor.model.node import Node, Process
    from ddpdoctor.model.reaching import Door, JobTold, Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Left by a process as soon as it has reached the others."""

    host: str
    machine: str
    """Equal for processes of one host, or of one container that has its own network."""
    told: JobTold
    rank: int
    """Among the processes that look."""
    leads: bool
    """Whether it looks for its whole node."""
    fewest: int
    most: int
    """Nodes, as it was told."""
    version: str
    """Of ddpdoctor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What it has read of itself, and of its node where it leads."""

    process: Process
    node: Node | None = None
    publication: Publication | None = None
    """``number`` is that of its arrival."""
    serves: bool = False
    """Whether it is to serve the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The number of a node that came."""

    number: int
    arrival: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who is there, by number, and what is to be done."""

    seats: tuple[Seat, ...]
    publications: tuple[Publication, ...]
    """By number of the seat; the one that judges stands first."""
    servers: tuple[int, ...]
    """Arrivals of those that are to serve the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What came of serving the store."""

    not_served: str = ""
    """Why not: a phrase."""
    without_torch: str = ""
    """Why it could not be tried: a phrase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtDoor:
    """What a node saw of the store, and whether it got through the mesh."""

    door: Door
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Whether all are to make a real start together."""

    run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """What was judged, for all."""

    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    nnodes: int
    hosts: tuple[str, ...]
    started_at: str
    ended_at: str
