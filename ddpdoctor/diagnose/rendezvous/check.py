"""Runs `check-rendezvous` on one node, from start to report, also if it cannot reach the others or loses them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch import effective_environment, read_node_launch
from ddpdoctor.collect.system import System
from ddpdoctor.diagnose.rendezvous.gathering import absent_visits
from ddpdoctor.diagnose.rendezvous.judging import RendezvousChecked, build_report, judge, rendezvous_data
from ddpdoctor.diagnose.rendezvous.meeting import NodeMeeting
from ddpdoctor.diagnose.rendezvous.member import make_member
from ddpdoctor.diagnose.rendezvous.messages import SentFacts
from ddpdoctor.diagnose.rendezvous.roles import follow, lead
from ddpdoctor.diagnose.rendezvous.visit import OwnVisit
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.findings import now
from ddpdoctor.model.node import Fleet
from ddpdoctor.model.reaching import Rendezvous, StoreView, Visit
from ddpdoctor.probes.rendezvous.store_probe import StoreWatch, more_telling
from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.diagnose.rendezvous.judging import RendezvousOptions
    from ddpdoctor.diagnose.rendezvous.member import OwnNode
    from ddpdoctor.model.reaching import Connecting


def check_rendezvous(wanted: RendezvousOptions, env: Mapping[str, str]) -> RendezvousChecked | None:
    """Meet the other nodes and check the connections. Return None on processes that do not read their node.

    Raises ``UserError`` if nothing says which nodes belong to the job.
    """
    started_at = now()
    effective = effective_environment(env, wanted.options)
    member = make_member(read_node_launch(effective), System(env=effective))
    if not member.launch.launch.reads_node:
        _stand_by(member, wanted)
        return None
    with (
        TorchProcess(effective) as torch,
        NodeMeeting(member.launch, effective, wanted.folder, over_store=True) as meeting,
    ):
        visit = OwnVisit(member=member, wanted=wanted, torch=torch, meeting=meeting, started_at=started_at)
        with StoreWatch(member.launch.host, member.launch.port, torch) as watch:
            try:
                entry = meeting.enter(wanted.timeout_s)
            except StoreError as error:
                return check_alone(visit, str(error), watch.attempts)
        try:
            return lead(visit, entry) if entry.serves else follow(visit, entry)
        except StoreError as error:
            return check_alone(visit, str(error))


def _stand_by(member: OwnNode, wanted: RendezvousOptions) -> None:
    """Send this process's variables, and leave the checks to the process that reads the node."""
    with NodeMeeting(member.launch, member.env, wanted.folder) as meeting:
        try:
            conversation = meeting.find(wanted.timeout_s).conversation
            number = conversation.add("arrived", 1)
            conversation.send(f"hello/{number}", member.arrived())
            conversation.send(f"facts/{number}", SentFacts(process=member.process))
        except StoreError:
            return  # the process that reads this node reports the problem


def check_alone(visit: OwnVisit, why: str, attempts: tuple[Connecting, ...] = ()) -> RendezvousChecked:
    """Read this node and check the store, unless that is already done, and judge only that.

    ``why`` says why the node is alone. ``attempts`` are its connections to the store while it searched for the others.
    """
    seen = visit.seen or visit.read(None, 0)
    view = visit.store_view or visit.view_store(None, None, 0)
    view = replace(view, way="", attempts=more_telling(attempts, view.attempts))
    rendezvous = _seen_alone(visit, seen, view, why)
    return RendezvousChecked(
        report=build_report(
            judge(rendezvous, visit.started_at, now()),
            visit.wanted,
            rendezvous_data(rendezvous),
            visit.member.launch.settings.world_size,
        ),
        number=visit.member.launch.settings.node_rank or 0,
        judged=False,
        shows=True,
    )


def _seen_alone(visit: OwnVisit, seen: SentFacts, view: StoreView, why: str) -> Rendezvous:
    launch = visit.member.launch
    own = launch.settings.node_rank or 0
    assert seen.node is not None
    assert seen.publication is not None
    node = replace(seen.node, processes=(visit.member.process,))
    there = Visit(
        number=own,
        host=node.host,
        arrived=True,
        settings=launch.settings,
        store_view=view,
        published=seen.publication.address,
        interface=seen.publication.interface,
        way_lost=why,
    )
    others = absent_visits(launch, (number for number in range(launch.fewest) if number != own))
    return Rendezvous(
        nnodes=launch.most,
        visits=tuple(sorted((there, *others), key=lambda one: one.number)),
        # The other nodes are unknown, so none is reported as missing.
        fleet=Fleet(
            nodes=(node,),
            launcher=launch.launch.launcher,
            world_size=launch.launch.world_size,
            nnodes=launch.most,
            problems=(f"this node could not reach the others: {why}",),
        ),
        complete=False,
        trust=visit.meeting.trust,
    )
