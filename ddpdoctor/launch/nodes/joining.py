"""The members of a job together: who of them is the first, and what a session does with the others."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.evidence import save

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.launch.nodes.first_node import FirstNode
    from ddpdoctor.launch.nodes.other_node import OtherNode
    from ddpdoctor.model.nodes import NodesSeen

FILE = "nodes.json"
"""In the run folder: who was seen, a ``NodesSeen``."""


def join_nodes(placement: Placement, folder: Path) -> FirstNode | OtherNode | None:
    """Begin to serve the others, or to look for the first; None where there is nobody, or nowhere to meet.

    Of members on one host that have no numbers the first is who gets the port. ``folder`` is where the report goes: all
    nodes may see the same one, and then it is a second way.
    """
    if placement.alone or not placement.hosts:
        return None
    from ddpdoctor.exchange.node_meeting import OwnPort
    from ddpdoctor.launch.nodes.first_node import FirstNode
    from ddpdoctor.launch.nodes.further_ways import further_ways
    from ddpdoctor.launch.nodes.other_node import OtherNode

    host = socket.gethostname()
    if placement.number == 0 or (placement.number is None and placement.one_host):
        first = FirstNode(placement, host, folder)
        if not first.serve() or placement.number == 0:
            return first
        first.close()
    other = OtherNode(placement, host, (OwnPort(placement.hosts, placement.port), *further_ways(placement, folder)))
    other.start()
    return other


def save_nodes(folder: Path, seen: NodesSeen) -> None:
    """Write who was seen into the run folder, whole or not at all; a full disk costs this, not the job."""
    with contextlib.suppress(OSError):
        save(folder / FILE, seen)
