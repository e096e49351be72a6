"""What the user asked `check-rendezvous` for, and what comes back."""

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
    """Ports for the pairs to connect on, both ends among them; None: any that the kernel gives."""
    timeout_s: float = 30.0
    """How long the nodes wait for each other."""
    folder: Path | None = None
    """--report-dir, by which nodes meet too where they share it."""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousChecked:
    """The report of one node: all have the same findings, unless a node saw nobody else."""

    report: Report
    number: int
    """Of this node."""
    judged: bool
    """Whether this node has gathered what all saw: report.json is its to write, node-N.json that of the others."""
    shows: bool
    """Whether it is for this node to put the report on its screen: under a launcher that draws all output together the
    one that has judged does, and each that saw nobody else."""
