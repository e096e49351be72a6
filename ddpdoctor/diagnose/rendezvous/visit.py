"""The steps of every node, judging or not. It keeps the results in case it loses the others."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.diagnose.rendezvous.meeting import PREFIX, in_background
from ddpdoctor.diagnose.rendezvous.member import read_own_node, seen_by
from ddpdoctor.diagnose.rendezvous.messages import Served
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.reaching import Contact, StartTrial, StoreView
from ddpdoctor.probes.rendezvous.mesh import MeshLimits, run_mesh
from ddpdoctor.probes.rendezvous.store_probe import knock
from ddpdoctor.probes.rendezvous.torch_process import IMPORT_LIMIT_S, NoTorch, TorchError

if TYPE_CHECKING:
    import threading

    from ddpdoctor.diagnose.rendezvous.judging import RendezvousOptions
    from ddpdoctor.diagnose.rendezvous.meeting import JoinedMeeting, NodeMeeting
    from ddpdoctor.diagnose.rendezvous.member import OwnNode
    from ddpdoctor.diagnose.rendezvous.messages import Seat, SeatList, SentFacts
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.launch import NodeLaunch
    from ddpdoctor.model.reaching import NodePair
    from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

Kind = TypeVar("Kind")
SERVED_LIMIT_S = IMPORT_LIMIT_S + 12
TRIAL_LIMIT_S = 20.0
"""Our choice: a healthy start of 64 nodes takes one second on an idle machine."""


class OwnVisit:
    """This node's part of the meeting."""

    def __init__(
        self, *, member: OwnNode, wanted: RendezvousOptions, torch: TorchProcess, meeting: NodeMeeting, started_at: str
    ) -> None:
        """Take this node's identity and tools."""
        self.member, self.wanted, self.torch, self.meeting = member, wanted, torch, meeting
        self.started_at = started_at
        self.seen: SentFacts | None = None
        self.store_view: StoreView | None = None
        self.way = ""
        self._serving: Serving | None = None

    def come_in(self, entry: JoinedMeeting) -> int:
        """Join, read this node, and send its facts. Return the number of arrival."""
        conversation = entry.conversation
        self.way = entry.way
        arrival = conversation.add("arrived", 1)
        conversation.send(f"hello/{arrival}", self.member.arrived())
        conversation.send(f"facts/{arrival}", self.read(entry, arrival))
        return arrival

    def read(self, entry: JoinedMeeting | None, arrival: int) -> SentFacts:
        """Read this node, then start serving the store. Reading comes first to detect another program on the port."""
        launch = self.member.launch
        node = read_own_node(self.member, entry)
        self.seen = seen_by(self.member, node, arrival, own_address=self.meeting.has_own_address is True)
        self._serving = Serving(launch, self.torch, self.meeting, serves=self.seen.serves)
        return self.seen

    def view_store(self, conversation: Conversation | None, roster: SeatList | None, arrival: int) -> StoreView:
        """Check the store from this node, after the serving nodes have said that they serve it."""
        assert self.seen is not None
        assert self._serving is not None
        served = self._serving.wait()
        if conversation is not None and roster is not None:
            if arrival in roster.servers:
                conversation.send(f"served/{arrival}", served)
            wait_for_store(conversation, roster)
        launch = self.member.launch
        self.store_view = StoreView(
            host=launch.host,
            port=launch.port,
            serves=self.seen.serves,
            not_served=served.not_served,
            without_torch=served.without_torch or self.torch.missing(),
            attempts=knock(launch.host, launch.port, self.torch),
            way=self.way,
        )
        if conversation is not None:
            conversation.send(f"store-view/{arrival}", self.store_view)
        return self.store_view

    def run_mesh(self, conversation: Conversation, roster: SeatList, seat: Seat) -> tuple[NodePair, ...]:
        """Connect to every other node, while all others do the same. Only the judging node gets all pairs."""
        if len(roster.publications) < 2:
            return ()
        limits = MeshLimits(port_range=self.wanted.port_range)
        return run_mesh(conversation.part("mesh/"), seat.number, roster.publications, limits)

    def try_start(self, roster: SeatList, seat: Seat) -> StartTrial:
        """Run a real start with one rank per node, at the same time as all other nodes."""
        launch, number = self.member.launch, seat.number
        try:
            found = self.torch.start(
                TRIAL_LIMIT_S, rank=number, world_size=len(roster.seats), host=launch.host, port=launch.port,
                prefix="ddpdoctor/start",
            )  # fmt: skip
        except TorchError as error:
            return StartTrial(node=number, ok=False, stage="store", error=str(error))
        return StartTrial(
            node=number,
            ok=not found["error"],
            stage="" if not found["error"] else str(found["stage"]),
            error=str(found["error"]),
            duration_s=float(found["duration_s"]),
        )


def wait_for_judge(conversation: Conversation, kind: type[Kind], key: str, limit_s: float) -> Kind:
    """Return a message of the judging node to all nodes. Raises ``StoreError`` if none arrives."""
    found = conversation.wait(kind, key, limit_s, "the node that judges")
    if found is None:
        raise StoreError(f"the node that judges did not continue within {limit_s:g} s")
    return found


def seat_of(roster: SeatList, arrival: int) -> Seat:
    """Return the seat of an arrival. Raises ``StoreError`` if it has none."""
    for seat in roster.seats:
        if seat.arrival == arrival:
            return seat
    raise StoreError("it came too late: the nodes had already been counted")


class Serving:
    """Serves the store in the background if that is this node's task, and opens the meeting over it."""

    def __init__(self, launch: NodeLaunch, torch: TorchProcess, meeting: NodeMeeting, *, serves: bool) -> None:
        """Start the background thread. If the launcher serves the store itself, it already does."""
        self.served = Served()
        self._launch, self._torch, self._meeting = launch, torch, meeting
        self._serves = serves
        self._thread: threading.Thread = in_background(self._serve)

    def wait(self) -> Served:
        """Wait for the result of serving."""
        self._thread.join()
        return self.served

    def _serve(self) -> None:
        if not self._serves:
            return
        try:
            if not self._launch.launch.agent_store:
                self._torch.serve(self._launch.port)
        except NoTorch as error:
            self.served = Served(without_torch=str(error))
            return
        except TorchError as error:
            self.served = Served(not_served=_plain(str(error)))
            return
        in_background(self._tunnel)

    def _tunnel(self) -> None:
        try:
            self._meeting.serve_over(open_job_store("127.0.0.1", self._launch.port, PREFIX, SERVED_LIMIT_S))
        except StoreError:
            return  # nodes that use ddpdoctor's own port do not need this


def _plain(error: str) -> str:
    """Extract the system's message from "… code: -98, name: EADDRINUSE, message: address already in use"."""
    found = re.search(r"name: (\w+), message: (.+)", error)
    return f"{found[2].rstrip('.')} ({found[1]})" if found is not None else error


def wait_for_store(conversation: Conversation, roster: SeatList) -> None:
    """Wait until the nodes that serve the store have said that they do, or why they cannot."""
    deadline = time.monotonic() + SERVED_LIMIT_S
    for arrival in roster.servers:
        conversation.wait(Served, f"served/{arrival}", max(0.0, deadline - time.monotonic()), f"arrival {arrival}")


def stored(view: StoreView) -> bool:
    """Return whether a node reached this job's store and has torch."""
    return not (view.not_served or view.without_torch) and any(
        one.contact is Contact.CONNECTED for one in view.attempts
    )
