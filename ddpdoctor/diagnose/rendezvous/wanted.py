"""The options and the result of `check-rendezvous`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.model.launch import NodeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousWanted:
    """The options of the command."""

    options: NodeOptions = field(default_factory=NodeOptions)
    port_range: tuple[int, int] | None = None
    """The first and last port for the connections of pairs. None: any port that the kernel assigns."""
    timeout_s: float = 30.0
    """How long the nodes wait for each other."""
    folder: Path | None = None
    """--report-dir. Nodes that share this folder can meet through it."""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousChecked:
    """The report of one node. All nodes have the same findings, except a node that met no other."""

    report: Report
    number: int
    """Number of this node."""
    judged: bool
    """Whether this node judged. It writes report.json, and the others write node-N.json."""
    shows: bool
    """Whether this node prints the report. If a launcher merges all output, only the judging node prints, and each node
    that met no other."""
