"""How the nodes of `check-rendezvous` and of `check-env` connect and collect their facts."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import ddpdoctor
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.meeting import HostedMeeting, NoMeeting, by_folder, by_port, by_store, find_deputy, find_meeting
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.wire import NO_TOKEN, VARIABLE, job_token
from ddpdoctor.model.launch import JobSettings, Visit, is_loopback
from ddpdoctor.model.node import SECTIONS, Fleet, Launcher, Node
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.probes.store import is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ddpdoctor.exchange.meeting import MeetingWay
    from ddpdoctor.exchange.store import Client, Store
    from ddpdoctor.model.findings import Check, Finding
    from ddpdoctor.model.launch import NodeLaunch, Publication
    from ddpdoctor.model.node import NodeProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeArrival:
    """Each process sends this as soon as it reaches the others."""

    host: str
    machine: str  # equal for processes of one host, or of one container that has its own network
    settings: JobSettings
    rank: int  # the rank among the checking processes
    leads: bool  # whether it reads its node
    fewest: int
    most: int  # the number of nodes in this process's settings
    version: str  # the version of ddpdoctor


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFacts:
    """The facts of a process, and of its node if it leads."""

    process: NodeProcess
    node: Node | None = None
    publication: Publication | None = None  # its ``number`` is the number of arrival
    serves: bool = False  # whether it serves the store


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
    publications: tuple[Publication, ...]  # Numbered like the seats. The judging node is first.
    servers: tuple[int, ...]  # arrival numbers of the nodes that serve the store


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The result of serving the store."""

    not_served: str = ""  # a phrase that says why it failed
    without_torch: str = ""  # a phrase that says why it could not be tried


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


PREFIX = "ddpdoctor/rendezvous/"  # keeps our keys apart from those of the launcher that owns the store
# Our choice: how long node 0 looks for a meeting at an address that is not its own before it serves one itself. The
# address may be wrong, or belong to a load balancer in front of node 0.
SEEK_FIRST_S = 4.0
# Our choice: if node 0 never joins, how long nodes that share a folder wait for the lowest of them to serve.
STAND_IN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMeeting:
    """This node has joined the others."""

    conversation: Conversation
    client: Client  # A connection to the serving node. It also gives the time on that node's clocks.
    serves: bool  # Whether this node serves the meeting. Then it also judges.
    way: str


class NodeMeeting(ExitStack):
    """A context manager that keeps the meeting open for this node, and for others if this node serves it."""

    def __init__(
        self, launch: NodeLaunch, env: Mapping[str, str], folder: Path | None, *, over_store: bool = False
    ) -> None:
        """Without ``over_store``, nodes connect only through ddpdoctor's own port or the folder, if they share one."""
        super().__init__()
        self._launch, self._over_store = launch, over_store
        self._folder = folder
        self._given = bool(env.get(VARIABLE))
        self._token = job_token(launch.launch, env)
        self._hosted: HostedMeeting | None = None

    @property
    def trust(self) -> str:
        if self._given:
            return f"the token of {VARIABLE}"
        if self._launch.launch.launcher is Launcher.SLURM:
            return "a token derived from the Slurm job, which other users of the cluster could derive too"
        port = self._launch.launch.port
        return f"any host that reaches port {port}, because {VARIABLE} is not set; the job's own store is as open"

    @cached_property
    def has_own_address(self) -> bool | None:
        """Whether the store's address belongs to this host, or None if unknown."""
        return is_own(self._launch.host, self._launch.port)

    def enter(self, limit_s: float) -> JoinedMeeting:
        """Serve the meeting or find it. Raises ``StoreError`` (``NoMeeting``) if no way works in time."""
        # Whether the others look for the meeting on this node
        launch = self._launch
        number = launch.settings.node_rank
        if number == 0 or launch.most == 1:
            may_serve = True
        elif is_loopback(launch.host):
            may_serve = number is None
        else:
            may_serve = launch.is_host is True or self.has_own_address is True
        if not may_serve:
            # Find the meeting. If nobody serves one, the lowest node among those that share a folder serves it.
            try:
                return self.find(limit_s)
            except NoMeeting:
                if self._folder is None:
                    raise
            token = self._token or NO_TOKEN
            client = find_deputy(self._folder, token, self._launch.settings.node_rank, STAND_IN_S)
            if client is not None:
                self.callback(client.close)
                return self._entry(client, serves=False, way="folder")
            hosted = self._hosted = self.enter_context(HostedMeeting(None, token))
            hosted.serve_folder(self._folder)
            return self._entry(hosted.values, serves=True, way="folder")
        elsewhere = not is_loopback(launch.host) and self.has_own_address is False
        if launch.most > 1 and elsewhere and not launch.is_host:
            try:
                return self.find(min(SEEK_FIRST_S, limit_s))
            except StoreError:
                pass  # nobody else serves one
        return self._serve()

    def serve_over(self, store: Store) -> None:
        if self._hosted is not None:
            self._hosted.serve_over(store)

    def _serve(self) -> JoinedMeeting:
        launch = self._launch
        hosted = HostedMeeting(launch.launch.port, self._token or NO_TOKEN, one_host=launch.most == 1)
        self._hosted = self.enter_context(hosted)
        if hosted.not_listening:
            try:
                # Another node of this job on the same host may already serve the meeting.
                return self.find(SEEK_FIRST_S)
            except StoreError:
                pass  # another program uses the port; the other ways remain
        if self._folder is not None:
            hosted.serve_folder(self._folder)
        return self._entry(hosted.values, serves=True, way="own port")

    def find(self, limit_s: float) -> JoinedMeeting:
        """Find a meeting that another node serves. Raises ``NoMeeting``."""
        launch = self._launch.launch
        ways: list[MeetingWay] = [by_port(launch.hosts, launch.port)]
        if self._over_store:
            ways.append(by_store(partial(open_job_store, self._launch.host, self._launch.port, PREFIX)))
        if self._folder is not None:
            ways.append(by_folder(self._folder))
        found = find_meeting(tuple(ways), self._token or NO_TOKEN, limit_s)
        self.callback(found.store.close)
        return self._entry(found.store, serves=False, way=found.way)

    def _entry(self, client: Client, *, serves: bool, way: str) -> JoinedMeeting:
        conversation = Conversation(
            client, self._token, first="the judging node", member="arrival",
            turned_away=lambda: 0 if self._hosted is None else self._hosted.server.strangers,
        )  # fmt: skip
        return JoinedMeeting(conversation=conversation, client=client, serves=serves, way=way)


def in_background(what: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=what, name="ddpdoctor-beside", daemon=True)
    thread.start()
    return thread


# Our choice: how long to wait after the last arrival if the nodes disagree on their number and the smallest number has
# been reached. The launch is already wrong then, and the other nodes may not exist.
GRACE_S = 3.0
FACTS_LIMIT_S = 40.0  # our choice: twice the time limit for reading a node
MOST_TOO_MANY = 64  # How many more arrivals than expected are accepted. More are a launch error.


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The processes that joined, by number of arrival."""

    arrived: Mapping[int, NodeArrival]
    seen: Mapping[int, SentFacts]  # the facts of those that sent any

    def leads(self) -> dict[int, NodeArrival]:
        return {number: arrival for number, arrival in self.arrived.items() if arrival.leads}


def gather_arrivals(conversation: Conversation, launch: NodeLaunch, limit_s: float) -> dict[int, NodeArrival]:
    most = 2 * launch.launch.world_size + MOST_TOO_MANY
    counted, last_came_s = 0, time.monotonic()

    def is_over(arrived: Mapping[int, NodeArrival]) -> bool:
        nonlocal counted, last_came_s
        if len(arrived) > counted:
            counted, last_came_s = len(arrived), time.monotonic()
        return is_complete(launch, arrived.values(), time.monotonic() - last_came_s)

    def arrivals() -> range:
        return range(1, min(conversation.add("arrived", 0), most) + 1)

    return conversation.gather(NodeArrival, "hello", arrivals, limit_s, is_over=is_over)


def is_complete(launch: NodeLaunch, arrived: Iterable[NodeArrival], waited_s: float) -> bool:
    """Return whether to stop waiting. ``waited_s`` is the time since the last arrival."""
    each = tuple(arrived)
    leads = [arrival for arrival in each if arrival.leads]
    if not leads:
        return False
    # On a host with several ranks, all of them join, but only one reads the host.
    by_ranks = launch.launch.launcher is not Launcher.NNODES
    ranks_are_there = not by_ranks or len(each) >= launch.launch.world_size
    if len(leads) >= max(lead.most for lead in leads):
        return ranks_are_there or waited_s >= GRACE_S
    differ = len({(lead.fewest, lead.most) for lead in leads}) > 1
    # More nodes of an elastic job may join until the time is up. torchrun waits too (last_call_timeout).
    return differ and len(leads) >= min(lead.fewest for lead in leads) and waited_s >= GRACE_S


def seat_nodes(arrivals: Arrivals, judge: int, most: int) -> tuple[Seat, ...]:
    """Assign a number to each node: its node rank if that is valid and free, and else any free number."""
    leads = arrivals.leads()
    by_number: dict[int, int] = {}
    rest: list[int] = []
    for arrival in sorted(leads, key=lambda lead: (lead != judge, lead)):
        said = leads[arrival].settings.node_rank
        if said is not None and 0 <= said < most and said not in by_number:
            by_number[said] = arrival
        else:
            rest.append(arrival)
    free = (number for number in itertools.count() if number not in by_number)
    by_number |= dict(zip(itertools.islice(free, len(rest)), rest, strict=True))
    there = [(number, by_number[number]) for number in sorted(by_number)]
    return tuple(Seat(number=number, arrival=arrival, host=leads[arrival].host) for number, arrival in there)


def make_roster(arrivals: Arrivals, judge: int, most: int) -> SeatList:
    seats = [seat for seat in seat_nodes(arrivals, judge, most) if seat.arrival in arrivals.seen]
    found = {seat: arrivals.seen[seat.arrival].publication for seat in sorted(seats, key=lambda s: s.arrival != judge)}
    return SeatList(
        seats=tuple(seats),
        publications=tuple(replace(post, number=seat.number) for seat, post in found.items() if post is not None),
        servers=tuple(seat.arrival for seat in seats if arrivals.seen[seat.arrival].serves),
    )


def assemble_fleet(
    arrivals: Arrivals, seats: Iterable[Seat], launch: NodeLaunch, problems: Iterable[str] = ()
) -> Fleet:
    seats = tuple(seats)
    hosts = [seat.host for seat in seats]
    nodes = []
    for index, seat in enumerate(seats):
        own = arrivals.seen.get(seat.arrival)
        machine = arrivals.arrived[seat.arrival].machine
        near = [number for number, other in arrivals.arrived.items() if not other.leads and other.machine == machine]
        beside = [arrivals.seen[number].process for number in near if number in arrivals.seen]
        first = [] if own is None else [own.process]
        processes = sorted([*first, *beside], key=lambda process: -1 if process.rank is None else process.rank)
        if own is None or own.node is None:
            unread = Unread(why=Why.TIMEOUT, reason=f"{seat.host} connected, but did not send its facts")
            node = Node(host=seat.host, processes=tuple(processes), **dict.fromkeys(SECTIONS, unread))  # type: ignore[arg-type]
        else:
            node = replace(own.node, processes=tuple(processes))
        twice = hosts.count(seat.host) > 1
        nodes.append(replace(node, index=index, host=f"{seat.host} (node {seat.number})" if twice else seat.host))
    # The missing nodes, or the missing ranks if the launcher counts ranks
    if launch.launch.launcher is Launcher.NNODES:
        missing = absent_numbers(arrivals, seats)
    else:
        came = {arrival.rank for arrival in arrivals.arrived.values()}
        missing = tuple(rank for rank in range(launch.launch.world_size) if rank not in came)
    others = [lead for lead in arrivals.leads().values() if lead.version != ddpdoctor.__version__]
    here = f"and {ddpdoctor.__version__} on the judging node"
    versions = [f"ddpdoctor {lead.version} on {lead.host}, {here}" for lead in others]
    return Fleet(
        nodes=tuple(nodes),
        launcher=launch.launch.launcher,
        world_size=launch.launch.world_size,
        nnodes=launch.most,
        missing=missing,
        problems=(*problems, *versions),
    )


def absent_numbers(arrivals: Arrivals, seats: Iterable[Seat]) -> tuple[int, ...]:
    """Return the numbers of required nodes that did not join. If nodes disagree on the total, the least one counts."""
    expected = min((lead.fewest for lead in arrivals.leads().values()), default=0)
    there = {seat.number for seat in seats}
    lacking = max(0, expected - len(there))
    return tuple(number for number in range(expected) if number not in there)[:lacking]


def absent_visits(launch: NodeLaunch, numbers: Iterable[int]) -> list[Visit]:
    hosts = dict(enumerate(launch.hosts))
    return [Visit(number=n, host=hosts.get(n, ""), arrived=False, settings=JobSettings()) for n in numbers]
