"""The steps of every node, judging or not. It keeps the results in case it loses the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.diagnose.rendezvous.member import read_own_node, seen_by
from ddpdoctor.diagnose.rendezvous.messages import AtDoor
from ddpdoctor.diagnose.rendezvous.steps import Serving, look_at_door, try_start, wait_for_store
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.probes.rendezvous.mesh import MeshLimits, run_mesh

if TYPE_CHECKING:
    from ddpdoctor.diagnose.rendezvous.judging import RendezvousOptions
    from ddpdoctor.diagnose.rendezvous.meeting import Entry, NodeMeeting
    from ddpdoctor.diagnose.rendezvous.member import Member
    from ddpdoctor.diagnose.rendezvous.messages import Roster, Seat, Seen
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.reaching import Door, NodePair, StartTrial
    from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

Kind = TypeVar("Kind")


class OwnVisit:
    """This node's part of the meeting."""

    def __init__(
        self, *, member: Member, wanted: RendezvousOptions, torch: TorchProcess, meeting: NodeMeeting, started_at: str
    ) -> None:
        """Take this node's identity and tools."""
        self.member, self.wanted, self.torch, self.meeting = member, wanted, torch, meeting
        self.started_at = started_at
        self.seen: Seen | None = None
        self.door: Door | None = None
        self.way = ""
        self._serving: Serving | None = None

    def come_in(self, entry: Entry) -> int:
        """Join, read this node, and send its facts. Return the number of arrival."""
        conversation = entry.conversation
        self.way = entry.way
        arrival = conversation.add("arrived", 1)
        conversation.send(f"hello/{arrival}", self.member.arrived())
        conversation.send(f"facts/{arrival}", self.read(entry, arrival))
        return arrival

    def read(self, entry: Entry | None, arrival: int) -> Seen:
        """Read this node, then start serving the store. Reading comes first to detect another program on the port."""
        launch = self.member.launch
        node = read_own_node(self.member, entry)
        self.seen = seen_by(self.member, node, arrival, own_address=self.meeting.has_own_address is True)
        self._serving = Serving(launch, self.torch, self.meeting, serves=self.seen.serves)
        return self.seen

    def look_at_store(self, conversation: Conversation | None, roster: Roster | None, arrival: int) -> Door:
        """Check the store from this node, after the serving nodes have said that they serve it."""
        assert self.seen is not None
        assert self._serving is not None
        served = self._serving.wait()
        if conversation is not None and roster is not None:
            if arrival in roster.servers:
                conversation.send(f"served/{arrival}", served)
            wait_for_store(conversation, roster)
        self.door = look_at_door(self.member.launch, self.torch, serves=self.seen.serves, served=served, way=self.way)
        if conversation is not None:
            conversation.send(f"door/{arrival}", AtDoor(door=self.door))
        return self.door

    def run_mesh(self, conversation: Conversation, roster: Roster, seat: Seat) -> tuple[NodePair, ...]:
        """Connect to every other node, while all others do the same. Only the judging node gets all pairs."""
        if len(roster.publications) < 2:
            return ()
        limits = MeshLimits(port_range=self.wanted.port_range)
        return run_mesh(conversation.part("mesh/"), seat.number, roster.publications, limits)

    def try_start(self, roster: Roster, seat: Seat) -> StartTrial:
        """Run a real start at the same time as all other nodes."""
        return try_start(self.member.launch, self.torch, seat.number, len(roster.seats))


def wait_for_judge(conversation: Conversation, kind: type[Kind], key: str, limit_s: float) -> Kind:
    """Return a message of the judging node to all nodes. Raises ``StoreError`` if none arrives."""
    found = conversation.wait(kind, key, limit_s, "the node that judges")
    if found is None:
        raise StoreError(f"the node that judges did not go on within {limit_s:g} s")
    return found


def seat_of(roster: Roster, arrival: int) -> Seat:
    """Return the seat of an arrival. Raises ``StoreError`` if it has none."""
    for seat in roster.seats:
        if seat.arrival == arrival:
            return seat
    raise StoreError("it came, or said what it had read, after the others had been counted")
