"""The report of a node that could not reach the others or has lost them. It uses only the node's own facts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.diagnose.rendezvous.judging import build_report, judge, rendezvous_data
from ddpdoctor.diagnose.rendezvous.wanted import RendezvousChecked
from ddpdoctor.diagnose.reports import now
from ddpdoctor.model.node import Fleet
from ddpdoctor.model.reaching import Door, JobTold, Rendezvous, Visit
from ddpdoctor.probes.rendezvous.store_probe import more_telling

if TYPE_CHECKING:
    from ddpdoctor.diagnose.rendezvous.messages import Seen
    from ddpdoctor.diagnose.rendezvous.visit import OwnVisit
    from ddpdoctor.model.launch import NodeLaunch
    from ddpdoctor.model.reaching import Connecting


def check_alone(visit: OwnVisit, why: str, attempts: tuple[Connecting, ...] = ()) -> RendezvousChecked:
    """Read this node and check the store, unless that is already done, and judge only that.

    ``why`` says why the node is alone. ``attempts`` are its connections to the store while it searched for the others.
    """
    seen = visit.seen or visit.read(None, 0)
    door = visit.door or visit.look_at_store(None, None, 0)
    door = replace(door, way="", attempts=more_telling(attempts, door.attempts))
    rendezvous = _seen_alone(visit, seen, door, why)
    return RendezvousChecked(
        report=build_report(
            judge(rendezvous, visit.started_at, now()),
            visit.wanted,
            rendezvous_data(rendezvous),
            visit.member.launch.told.world_size,
        ),
        number=_own_number(visit.member.launch),
        judged=False,
        shows=True,
    )


def _own_number(launch: NodeLaunch) -> int:
    return launch.told.node_rank or 0


def _seen_alone(visit: OwnVisit, seen: Seen, door: Door, why: str) -> Rendezvous:
    launch, own = visit.member.launch, _own_number(visit.member.launch)
    assert seen.node is not None
    node = replace(seen.node, processes=(visit.member.process,))
    there = Visit(
        number=own,
        host=node.host,
        arrived=True,
        told=launch.told,
        door=door,
        published=seen.publication.address if seen.publication is not None else "",
        interface=seen.publication.interface if seen.publication is not None else "",
        way_lost=why,
    )
    others = tuple(
        Visit(number=number, host=_name(launch, number), arrived=False, told=JobTold())
        for number in range(launch.fewest)
        if number != own
    )
    return Rendezvous(
        nnodes=launch.most,
        visits=tuple(sorted((there, *others), key=lambda one: one.number)),
        # The other nodes are unknown, so none is reported as missing.
        fleet=Fleet(
            nodes=(node,),
            launcher=launch.launch.launcher,
            world_size=launch.launch.world_size,
            nnodes=launch.most,
            problems=(f"this node could not meet the others: {why}",),
        ),
        complete=False,
        trust=visit.meeting.trust,
    )


def _name(launch: NodeLaunch, number: int) -> str:
    return launch.hosts[number] if number < len(launch.hosts) else ""
