"""Joins a job's members: decides whether this one is the first, and starts serving or looking for the first."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.evidence import save
from ddpdoctor.model.facts import MEMBERS_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.launch.nodes.first_node import FirstNode
    from ddpdoctor.launch.nodes.other_node import OtherNode
    from ddpdoctor.model.facts import NodesSeen

FILE = "nodes.json"
"""The file in the run folder with the state of all members, a ``NodesSeen``."""


def join_nodes(placement: Placement, folder: Path) -> FirstNode | OtherNode | None:
    """Start to serve the others or to look for the first; return None if there are no others, or no place to meet.

    If members on one host have no numbers, the one that gets the port is the first. ``folder`` is where the report
    goes; if all nodes see the same folder, it is a second way to the first member.
    """
    if placement.alone or not placement.hosts:
        return None
    from ddpdoctor.exchange.meeting import OwnPort
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


def save_members(folder: Path, seen: NodesSeen) -> None:
    """Write the state of all members while the job runs, for `ddpdoctor status`. A full disk is ignored."""
    with contextlib.suppress(OSError):
        save(folder / MEMBERS_NAME, seen)


def save_nodes(folder: Path, seen: NodesSeen) -> None:
    """Write the state of all members into the run folder, completely or not at all. A full disk is ignored."""
    with contextlib.suppress(OSError):
        save(folder / FILE, seen)
