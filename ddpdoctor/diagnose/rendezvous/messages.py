"""The messages between the nodes.

Keys: ``arrived`` counts the arrivals. Arrival number N sends ``hello/N``, ``facts/N``, ``store-view/N``, ``served/N``
and ``trial/N``. The judging node sends ``head``, ``roster`` and ``trials``, and its goodbye is the verdict. Keys of the
mesh begin with ``mesh/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Check, Finding
    from ddpdoctor.model.node import Node, NodeProcess
    from ddpdoctor.model.reaching import JobSettings, Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeArrival:
    """Each process sends this as soon as it reaches the others."""

    host: str
    machine: str
    """Equal for processes of one host, or of one container that has its own network."""
    settings: JobSettings
    rank: int
    """The rank among the checking processes."""
    leads: bool
    """Whether it reads its node."""
    fewest: int
    most: int
    """The number of nodes in this process's settings."""
    version: str
    """The version of ddpdoctor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFacts:
    """The facts of a process, and of its node if it leads."""

    process: NodeProcess
    node: Node | None = None
    publication: Publication | None = None
    """Its ``number`` is the number of arrival."""
    serves: bool = False
    """Whether it serves the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The number of a joined node."""

    number: int
    arrival: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatList:
    """The joined nodes and their tasks."""

    seats: tuple[Seat, ...]
    publications: tuple[Publication, ...]
    """Numbered like the seats. The judging node is first."""
    servers: tuple[int, ...]
    """Arrival numbers of the nodes that serve the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The result of serving the store."""

    not_served: str = ""
    """A phrase that says why it failed."""
    without_torch: str = ""
    """A phrase that says why it could not be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Whether all nodes should run a real start together."""

    run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """The verdict, for all nodes."""

    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    nnodes: int
    hosts: tuple[str, ...]
    started_at: str
    ended_at: str
