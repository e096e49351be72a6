"""The report of `check-rendezvous`."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import ddpdoctor
from ddpdoctor.collect.bounded import ask_one
from ddpdoctor.collect.launch import effective_environment, read_identity, read_node_launch, read_process
from ddpdoctor.collect.system import ReadingPlan, System, read_node
from ddpdoctor.diagnose.machines import FQDN_LIMIT_S, Head, sections_of
from ddpdoctor.diagnose.meeting import (
    FACTS_LIMIT_S,
    GRACE_S,
    PREFIX,
    Arrivals,
    NodeArrival,
    NodeMeeting,
    SeatList,
    Sentence,
    SentFacts,
    Served,
    Trials,
    absent_numbers,
    absent_visits,
    assemble_fleet,
    gather_arrivals,
    in_background,
    make_roster,
    seat_nodes,
)
from ddpdoctor.diagnose.report import make_report, reworded
from ddpdoctor.exchange.conversation import measure_clocks
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import JobStatus, JobSummary, now
from ddpdoctor.model.launch import Contact, NodeOptions, Publication, Rendezvous, StartTrial, StoreView, Visit
from ddpdoctor.model.node import Fleet
from ddpdoctor.model.reading import Unread, known
from ddpdoctor.probes.mesh import MeshLimits, run_mesh
from ddpdoctor.probes.store import IMPORT_LIMIT_S, NoTorch, StoreWatch, TorchError, TorchProcess, knock, more_telling
from ddpdoctor.rules.engine import fleet_facts, in_order, order_findings
from ddpdoctor.rules.engine import judge as ask
from ddpdoctor.rules.environment.master import takes_itself_for
from ddpdoctor.rules.network import choose
from ddpdoctor.rules.registry import CheckGroup, rules_of
from ddpdoctor.rules.rendezvous.mesh import Meeting

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import Any

    from ddpdoctor.collect.launch import Identity
    from ddpdoctor.diagnose.meeting import JoinedMeeting, Seat
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.findings import Check, Finding, Judgment, Report
    from ddpdoctor.model.launch import Connecting, NodeLaunch, NodePair
    from ddpdoctor.model.node import NodeProcess
    from ddpdoctor.rules.registry import Rule

BESIDE = frozenset({"clock", "version-same"})  # checks of other groups that concern how nodes start together
HEAD_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNode:
    """This node's identity and launch."""

    launch: NodeLaunch
    system: System
    process: NodeProcess
    identity: Identity

    def arrived(self) -> NodeArrival:
        launch = self.launch
        return NodeArrival(
            host=self.identity.host,
            machine=f"{self.identity.machine}/{self.identity.container}",
            settings=launch.settings,
            rank=launch.launch.rank,
            leads=launch.launch.reads_node,
            fewest=launch.fewest,
            most=launch.most,
            version=ddpdoctor.__version__,
        )


def chosen_rules() -> tuple[Rule, ...]:
    groups = {CheckGroup.NETWORK, CheckGroup.LAUNCH}
    return tuple(rule for rule in rules_of("environment") if rule.group in groups or rule.kind in BESIDE)


# Our choice: up to this many pairs, the report lists all. Above it, the report lists only failing pairs.
PAIRS_SHOWN = 32 * 31
_PREFIX = "PET_"


def judge(rendezvous: Rendezvous, started_at: str, ended_at: str) -> Sentence:
    """Run all rules, those about machines first, so that later rules do not report consequences of their findings."""
    findings, checks = judge_meeting(rendezvous, ask(chosen_rules(), fleet_facts(rendezvous.fleet)))
    return Sentence(
        findings=order_findings(findings),
        checks=checks,
        nnodes=rendezvous.nnodes,
        hosts=tuple(visit.host for visit in rendezvous.visits if visit.arrived),
        started_at=started_at,
        ended_at=ended_at,
    )


def judge_meeting(rendezvous: Rendezvous, judged: Judgment) -> tuple[tuple[Finding, ...], tuple[Check, ...]]:
    """Add the results of the rendezvous rules. Each rule gets the findings of the rules before it."""
    findings = judged.findings
    checks: list[Check] = []
    for rule in in_order(rules_of("rendezvous")):
        more = ask([rule], {Meeting: [Meeting(rendezvous=rendezvous, found=findings)]})
        findings = (*findings, *more.findings)
        checks += more.checks
    return findings, (*judged.checks, *sorted(checks, key=lambda check: check.code))


def build_report(sentence: Sentence, wanted: RendezvousOptions, data: dict[str, Any], world_size: int | None) -> Report:
    findings = as_typed(sentence.findings, wanted.options)
    return make_report(
        command=wanted.command,
        started_at=sentence.started_at,
        ended_at=sentence.ended_at,
        job=JobSummary(world_size=world_size, nnodes=sentence.nnodes, status=JobStatus.NOT_RUN, exit_status=None),
        findings=findings,
        checks=sentence.checks,
        data=data,
    )


def rendezvous_data(rendezvous: Rendezvous) -> dict[str, Any]:
    pairs = rendezvous.pairs
    if len(pairs) > PAIRS_SHOWN:
        pairs = tuple(pair for pair in pairs if not is_whole((pair,)))
    plain = encode(replace(rendezvous, pairs=pairs, fleet=replace(rendezvous.fleet, nodes=())))
    fleet = plain.pop("fleet")
    return {
        "verb": "check-rendezvous",
        "hosts": [node.host for node in rendezvous.fleet.nodes],
        "launcher": fleet["launcher"],
        "world_size": fleet["world_size"],
        "missing_ranks": fleet["missing"],
        "gathering": fleet["problems"],
        "nodes": rendezvous.fleet.nodes,
        "rendezvous": {**plain, "pairs_tried": len(rendezvous.pairs)},
    }


def as_typed(findings: Iterable[Finding], options: NodeOptions) -> tuple[Finding, ...]:
    """Return the findings with option names in place of the variables that the options set."""
    names = [name for name in options.variables() if name.startswith(_PREFIX)]
    if not names:
        return tuple(findings)
    pattern = re.compile(rf"(?:export )?\b({'|'.join(names)})\b")

    def typed(text: str) -> str:
        # PET_NODE_RANK is --node-rank of torchrun.
        return pattern.sub(lambda found: "--" + found[1].removeprefix(_PREFIX).lower().replace("_", "-"), text)

    return tuple(reworded(finding, typed) for finding in findings)


def is_whole(pairs: Iterable[NodePair]) -> bool:
    contacts = ((pair.connecting, *filter(None, (pair.small, pair.large))) for pair in pairs)
    transfers = [transfer for those in contacts for transfer in those]
    return all(transfer is not None and transfer.contact is Contact.CONNECTED for transfer in transfers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """The options of the command."""

    options: NodeOptions = field(default_factory=NodeOptions)
    # The first and last port for the connections of pairs. None: any port that the kernel assigns.
    port_range: tuple[int, int] | None = None
    timeout_s: float = 30.0  # how long the nodes wait for each other
    folder: Path | None = None  # --report-dir. Nodes that share this folder can meet through it.
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousChecked:
    """The report of one node. All nodes have the same findings, except a node that reached no other."""

    report: Report
    number: int  # number of this node
    judged: bool  # Whether this node judged. It writes report.json, and the others write node-N.json.
    # Whether this node prints the report. If a launcher merges all output, only the judging node prints, and each node
    # that met no other.
    shows: bool


Kind = TypeVar("Kind")
SERVED_LIMIT_S = IMPORT_LIMIT_S + 12
TRIAL_LIMIT_S = 20.0  # our choice: a healthy start of 64 nodes takes one second on an idle machine


class OwnVisit:
    """This node's part of the meeting."""

    def __init__(
        self, *, member: OwnNode, wanted: RendezvousOptions, torch: TorchProcess, meeting: NodeMeeting, started_at: str
    ) -> None:
        self.member, self.wanted, self.torch, self.meeting = member, wanted, torch, meeting
        self.started_at = started_at
        self.seen: SentFacts | None = None
        self.store_view: StoreView | None = None
        self.way = ""
        self._serving: threading.Thread | None = None
        self._served = Served()

    def come_in(self, entry: JoinedMeeting) -> int:
        conversation = entry.conversation
        self.way = entry.way
        arrival = conversation.add("arrived", 1)
        conversation.send(f"hello/{arrival}", self.member.arrived())
        conversation.send(f"facts/{arrival}", self.read(entry, arrival))
        return arrival

    def read(self, entry: JoinedMeeting | None, arrival: int) -> SentFacts:
        """Read this node, then start serving the store. Reading comes first to detect another program on the port."""
        # All look up the name of the first host, which only torchrun's c10d rendezvous publishes.
        member, launch = self.member, self.member.launch
        head: str | None = None
        if entry is not None and not launch.by_number:
            if entry.serves:
                head = ask_one(member.system.calls.fqdn, FQDN_LIMIT_S).value
                entry.conversation.send("head", Head(fqdn=head))
            else:
                sent = entry.conversation.wait(Head, "head", HEAD_LIMIT_S, "the judging node")
                head = None if sent is None else sent.fqdn
        plan = ReadingPlan(sections=sections_of(chosen_rules()), use_torch=False, head=head)
        node = read_node(member.system, plan, (member.process,))
        if entry is not None and not isinstance(node.clock, Unread):
            offset_s = 0.0 if entry.serves else measure_clocks(entry.client).wall_s
            node = replace(node, clock=replace(node.clock, offset_s=offset_s))
        # Whether this node serves the store, by its number or by the logic of torchrun's c10d. That logic can fail if
        # the address belongs to this host but its name does not resolve to it. The node still serves then, so that
        # other problems can be found too.
        serves = launch.settings.node_rank == 0 if launch.by_number else launch.is_host
        if serves is None:
            names = known(node.names)
            takes_itself = names is not None and takes_itself_for(names, launch.host) is True
            serves = self.meeting.has_own_address is True or takes_itself
        # The address at which others would reach this node's ranks: Gloo's, or else NCCL's
        publication = Publication(number=arrival, address="", interface="")
        if (network := known(node.network)) is not None:
            choice = choose(node, network)
            for pick in choice.nccl[:1] if choice.gloo is None else choice.gloo[:1]:
                publication = replace(publication, address=str(pick.ip), interface=pick.interface.name)
        bare = replace(node, processes=())
        self.seen = SentFacts(process=member.process, node=bare, publication=publication, serves=serves)
        if serves:
            self._serving = in_background(self._serve)
        return self.seen

    def _serve(self) -> None:
        """Serve the store, unless the launcher does, and open the meeting over it."""
        launch = self.member.launch
        try:
            if not launch.launch.agent_store:
                self.torch.serve(launch.port)
        except NoTorch as error:
            self._served = Served(without_torch=str(error))
            return
        except TorchError as error:
            # The system's message in "… code: -98, name: EADDRINUSE, message: address already in use"
            found = re.search(r"name: (\w+), message: (.+)", str(error))
            words = f"{found[2].rstrip('.')} ({found[1]})" if found is not None else str(error)
            self._served = Served(not_served=words)
            return

        def tunnel() -> None:
            with suppress(StoreError):  # nodes that use ddpdoctor's own port do not need this
                self.meeting.serve_over(open_job_store("127.0.0.1", launch.port, PREFIX, SERVED_LIMIT_S))

        in_background(tunnel)

    def view_store(self, conversation: Conversation | None, roster: SeatList | None, arrival: int) -> StoreView:
        assert self.seen is not None
        if self._serving is not None:
            self._serving.join()
        served = self._served
        if conversation is not None and roster is not None:
            if arrival in roster.servers:
                conversation.send(f"served/{arrival}", served)
            deadline = time.monotonic() + SERVED_LIMIT_S
            for server in roster.servers:
                left_s = max(0.0, deadline - time.monotonic())
                conversation.wait(Served, f"served/{server}", left_s, f"arrival {server}")
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
        launch, number = self.member.launch, seat.number
        try:
            found = self.torch.start(
                TRIAL_LIMIT_S, rank=number, world_size=len(roster.seats), host=launch.host, port=launch.port,
                prefix="ddpdoctor/start",
            )  # fmt: skip
        except TorchError as error:
            return StartTrial(node=number, ok=False, stage="store", error=str(error))
        text, stage = str(found["error"]), str(found["stage"]) if found["error"] else ""
        return StartTrial(node=number, ok=not text, stage=stage, error=text, duration_s=float(found["duration_s"]))


def wait_for_judge(conversation: Conversation, kind: type[Kind], key: str, limit_s: float) -> Kind:
    """Return a message of the judging node to all nodes. Raises ``StoreError`` if none arrives."""
    found = conversation.wait(kind, key, limit_s, "the judging node")
    if found is None:
        raise StoreError(f"the judging node did not continue within {limit_s:g} s")
    return found


def seat_of(roster: SeatList, arrival: int) -> Seat:
    """Return the seat of an arrival. Raises ``StoreError`` if it has none."""
    for seat in roster.seats:
        if seat.arrival == arrival:
            return seat
    raise StoreError("it joined too late: the nodes had already been counted")


STORE_VIEW_LIMIT_S = 15.0  # our choice: how long to wait for a node's check of the store after the mesh has ended
TRIAL_LIMIT_OF_OTHERS_S = TRIAL_LIMIT_S + 8.0
SEE_OFF_S = 10.0  # our choice: how long to stay until all remaining nodes have received the verdict
# Our choice: the mesh of hundreds of nodes takes minutes. If the judging node dies, its connection shows it.
STEP_LIMIT_S = 600.0


def lead(visit: OwnVisit, entry: JoinedMeeting) -> RendezvousChecked:
    conversation, launch = entry.conversation, visit.member.launch
    began = time.monotonic()
    arrival = visit.come_in(entry)
    arrived = gather_arrivals(conversation, launch, visit.wanted.timeout_s - (time.monotonic() - began))
    seen = conversation.gather(SentFacts, "facts", lambda: arrived, FACTS_LIMIT_S)
    arrivals = Arrivals(arrived=arrived, seen=seen)
    roster = make_roster(arrivals, arrival, launch.most)
    conversation.send("roster", roster)
    seat = seat_of(roster, arrival)
    visit.view_store(conversation, roster, arrival)
    pairs = visit.run_mesh(conversation, roster, seat)
    numbers = [member.arrival for member in roster.seats]
    views = conversation.gather(StoreView, "store-view", lambda: numbers, STORE_VIEW_LIMIT_S)
    seats = seat_nodes(arrivals, arrival, launch.most)  # with nodes that sent nothing after they joined
    runs = is_whole(pairs) and _can_start(arrivals, roster, seats, views)
    conversation.send("trials", Trials(run=runs))
    trials: tuple[StartTrial, ...] = ()
    if runs:
        ended = {arrival: visit.try_start(roster, seat)}
        others = [member.arrival for member in roster.seats if member != seat]
        ended |= conversation.gather(StartTrial, "trial", lambda: others, TRIAL_LIMIT_OF_OTHERS_S)
        lost = "this node sent no more messages"
        trials = tuple(
            ended.get(member.arrival) or StartTrial(node=member.number, ok=False, stage="result", error=lost)
            for member in roster.seats
        )
    problems = []
    if turned_away := conversation.turned_away():
        strangers = f"{turned_away} connections without this job's token were turned away"
        problems.append(f"{strangers}: is DDPDOCTOR_TOKEN the same on all nodes?")
    rendezvous = Rendezvous(
        nnodes=launch.most,
        visits=_visits(arrivals, seats, views, launch),
        fleet=assemble_fleet(arrivals, seats, launch, problems),
        pairs=pairs,
        trials=trials,
        trust=visit.meeting.trust,
    )
    sentence = judge(rendezvous, visit.started_at, now())
    with suppress(StoreError):
        # Do not wait for nodes that were lost on the way.
        conversation.say_goodbye(sentence, lambda: len(views) - 1, SEE_OFF_S)
    report = build_report(sentence, visit.wanted, rendezvous_data(rendezvous), launch.settings.world_size)
    return RendezvousChecked(report=report, number=seat.number, judged=True, shows=True)


def _can_start(arrivals: Arrivals, roster: SeatList, seats: tuple[Seat, ...], views: Mapping[int, StoreView]) -> bool:
    """Return whether to try a real start. After another failure, it would only fail for a known reason."""
    leads = arrivals.leads().values()
    ranks = [lead.settings.node_rank for lead in leads if lead.settings.node_rank is not None]
    # The nodes that reached this job's store and have torch
    working = {arrival: view for arrival, view in views.items() if not (view.not_served or view.without_torch)}
    reached = {arrival: {attempt.contact for attempt in view.attempts} for arrival, view in working.items()}
    stored = {arrival for arrival, contacts in reached.items() if Contact.CONNECTED in contacts}
    return (
        len({(lead.fewest, lead.most) for lead in leads}) == 1
        and len(ranks) == len(set(ranks))
        and [seat.number for seat in roster.seats] == list(range(len(seats)))
        and not absent_numbers(arrivals, seats)
        and stored.issuperset(seat.arrival for seat in roster.seats)
    )


def _visits(
    arrivals: Arrivals, seats: tuple[Seat, ...], views: Mapping[int, StoreView], launch: NodeLaunch
) -> tuple[Visit, ...]:
    visits = absent_visits(launch, absent_numbers(arrivals, seats))
    for seat in seats:
        seen, view = arrivals.seen.get(seat.arrival), views.get(seat.arrival)
        publication = None if seen is None else seen.publication
        visits.append(
            Visit(
                number=seat.number,
                host=seat.host,
                arrived=True,
                settings=arrivals.arrived[seat.arrival].settings,
                store_view=view,
                published=publication.address if publication is not None else "",
                interface=publication.interface if publication is not None else "",
                way_lost="" if view is not None else "it connected, but sent nothing more",
            )
        )
    return tuple(sorted(visits, key=lambda visit: visit.number))


def follow(visit: OwnVisit, entry: JoinedMeeting) -> RendezvousChecked:
    """Take part. Raises ``StoreError`` if the meeting is lost or this node joins too late."""
    conversation = entry.conversation
    arrival = visit.come_in(entry)
    roster = wait_for_judge(conversation, SeatList, "roster", visit.wanted.timeout_s + FACTS_LIMIT_S + GRACE_S)
    seat = seat_of(roster, arrival)
    visit.view_store(conversation, roster, arrival)
    visit.run_mesh(conversation, roster, seat)
    if wait_for_judge(conversation, Trials, "trials", STEP_LIMIT_S).run:
        conversation.send(f"trial/{arrival}", visit.try_start(roster, seat))
    sentence = conversation.hear_goodbye(Sentence, STEP_LIMIT_S)
    if sentence is None:
        raise StoreError(f"the judging node did not continue within {STEP_LIMIT_S:g} s")
    launch = visit.member.launch
    assert visit.seen is not None
    assert visit.seen.node is not None
    data = {  # this node's own facts; the rest is in the report of the judging node
        "verb": "check-rendezvous",
        "hosts": list(sentence.hosts),
        "launcher": launch.launch.launcher.value,
        "nodes": [visit.seen.node],
        "door": visit.store_view,
    }
    report = build_report(sentence, visit.wanted, data, launch.settings.world_size)
    return RendezvousChecked(report=report, number=seat.number, judged=False, shows=launch.own_screen)


def check_rendezvous(wanted: RendezvousOptions, env: Mapping[str, str]) -> RendezvousChecked | None:
    """Join the other nodes and judge. Return None on processes that do not read their node. Raises ``UserError``."""
    started_at = now()
    effective = effective_environment(env, wanted.options)
    launch, system = read_node_launch(effective), System(env=effective)
    local_rank = launch.launch.local_rank
    process = read_process(system, rank=launch.settings.node_rank, local_rank=0 if local_rank is None else local_rank)
    member = OwnNode(launch=launch, system=system, process=process, identity=read_identity(system))
    if not member.launch.launch.reads_node:
        with NodeMeeting(launch, effective, wanted.folder) as meeting, suppress(StoreError):
            # If that fails, the process that reads this node reports the problem.
            conversation = meeting.find(wanted.timeout_s).conversation
            number = conversation.add("arrived", 1)
            conversation.send(f"hello/{number}", member.arrived())
            conversation.send(f"facts/{number}", SentFacts(process=process))
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


def check_alone(visit: OwnVisit, why: str, attempts: tuple[Connecting, ...] = ()) -> RendezvousChecked:
    """Judge only this node and the store; ``why`` is the reason, ``attempts`` how the store answered before."""
    seen = visit.seen or visit.read(None, 0)
    view = visit.store_view or visit.view_store(None, None, 0)
    view = replace(view, way="", attempts=more_telling(attempts, view.attempts))
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
    # The other nodes are unknown, so none is reported as missing.
    fleet = Fleet(
        nodes=(node,),
        launcher=launch.launch.launcher,
        world_size=launch.launch.world_size,
        nnodes=launch.most,
        problems=(f"this node could not reach the others: {why}",),
    )
    visits = tuple(sorted((there, *others), key=lambda other: other.number))
    trust = visit.meeting.trust
    rendezvous = Rendezvous(nnodes=launch.most, visits=visits, fleet=fleet, complete=False, trust=trust)
    sentence = judge(rendezvous, visit.started_at, now())
    report = build_report(sentence, visit.wanted, rendezvous_data(rendezvous), launch.settings.world_size)
    return RendezvousChecked(report=report, number=own, judged=False, shows=True)
