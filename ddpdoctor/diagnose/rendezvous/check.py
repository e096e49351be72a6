"""Runs `check-rendezvous` on one node, from start to report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.launch.nodes import effective_environment, read_node_launch
from ddpdoctor.collect.system import System
from ddpdoctor.diagnose.rendezvous.alone import check_alone
from ddpdoctor.diagnose.rendezvous.following import follow
from ddpdoctor.diagnose.rendezvous.leading import lead
from ddpdoctor.diagnose.rendezvous.meeting import NodeMeeting
from ddpdoctor.diagnose.rendezvous.member import make_member
from ddpdoctor.diagnose.rendezvous.messages import Seen
from ddpdoctor.diagnose.rendezvous.visit import OwnVisit
from ddpdoctor.diagnose.reports import now
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.probes.rendezvous.store_probe import StoreWatch
from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.diagnose.rendezvous.member import Member
    from ddpdoctor.diagnose.rendezvous.wanted import RendezvousChecked, RendezvousWanted


def check_rendezvous(wanted: RendezvousWanted, env: Mapping[str, str]) -> RendezvousChecked | None:
    """Meet the other nodes and check the connections. Return None on processes that do not read their node.

    Raises ``UserError`` if nothing says which nodes belong to the job.
    """
    started_at = now()
    told = effective_environment(env, wanted.options)
    member = make_member(read_node_launch(told), System(env=told))
    if not member.launch.launch.reads_node:
        _stand_by(member, wanted)
        return None
    with TorchProcess(told) as torch, NodeMeeting(member.launch, told, wanted.folder, torch) as meeting:
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


def _stand_by(member: Member, wanted: RendezvousWanted) -> None:
    """Send this process's variables, and leave the checks to the process that reads the node."""
    with NodeMeeting(member.launch, member.env, wanted.folder) as meeting:
        try:
            conversation = meeting.find(wanted.timeout_s).conversation
            number = conversation.add("arrived", 1)
            conversation.send(f"hello/{number}", member.arrived())
            conversation.send(f"facts/{number}", Seen(process=member.process))
        except StoreError:
            return  # the process that reads this node reports the problem
