"""Checks of machines: which checks, which machines, and the report."""

from __future__ import annotations

import difflib
import re
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ddpdoctor
from ddpdoctor.collect.bounded import TORCH_PROBE, ask_one, start_module
from ddpdoctor.collect.launch import read_identity, read_process, seen_launch
from ddpdoctor.collect.system import SECTIONS_FOR_BENCH, ReadingPlan, System, read_node
from ddpdoctor.diagnose.bundle import redact
from ddpdoctor.diagnose.report import check_report
from ddpdoctor.exchange.conversation import BadRecord, measure_offset, shown_clock
from ddpdoctor.exchange.meeting import meet
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.findings import now
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import SECTIONS, ExpectedVersion, Fleet, Launcher, Node
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.model.words import grouped, rank_list
from ddpdoctor.rules.engine import fleet_facts
from ddpdoctor.rules.environment.versions import VERSION_OF
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.collect.bounded import ChildProcess
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.node import NodeProcess
    from ddpdoctor.rules.registry import Rule

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")


def start_torch_early(env: Mapping[str, str]) -> ChildProcess | None:
    """Start the child if this process will read the machine: it is alone or first on its node. Else return None."""
    if any(env.get(name, "0") != "0" for name in LOCAL_RANKS):
        return None
    try:
        return start_module((TORCH_PROBE,), env)
    except OSError:
        return None  # the collector tries again and reports the problem


CLOSENESS = 0.5  # the least similarity, on difflib's scale from 0 to 1, at which a name is suggested for an unknown one
LIST_HINT = "`ddpdoctor check-env --list` lists them all."


def choose_rules(wanted: Iterable[str], unwanted: Iterable[str]) -> tuple[Rule, ...]:
    """Return the rules, in the order of their codes. Raises ``UserError`` for an unknown name, and if none is left."""
    rules = rules_of("environment")
    chosen = _find_all(wanted, rules) or {rule.code for rule in rules}
    left = chosen - _find_all(unwanted, rules)
    if not left:
        raise UserError("no check is left: --skip removes all of them", help=LIST_HINT)
    return tuple(rule for rule in rules if rule.code in left)


def sections_of(rules: Iterable[Rule]) -> frozenset[str]:
    return frozenset(section for rule in rules for section in rule.needs)


def _find_all(names: Iterable[str], rules: tuple[Rule, ...]) -> set[str]:
    """Find the codes for kinds, codes, and beginnings of codes such as DD1."""
    codes: set[str] = set()
    for name in [name.strip() for entry in names for name in entry.split(",") if name.strip()]:
        is_code = re.fullmatch(r"DD\d{0,3}", name.upper()) is not None
        found = {rule.code for rule in rules if rule.kind == name.lower()}
        found |= {rule.code for rule in rules if is_code and rule.code.startswith(name.upper())}
        if not found:
            near = difflib.get_close_matches(name.lower(), [rule.kind for rule in rules], cutoff=CLOSENESS)
            hint = f"Did you mean {', '.join(near)}? " if near else ""
            raise UserError(f"unknown check: {name}", help=hint + LIST_HINT)
        codes |= found
    return codes


FQDN_LIMIT_S = 2.0
LEAVE_LIMIT_S = 2.0
# Our choice: how much longer than rank 0 another host may take to read if all processes have already met.
SLOWEST_S = 30.0
MOST_NAMED = 64  # for how many ranks without an answer their hello is looked up


def gather(launch: Launch, system: System, plan: ReadingPlan, timeout_s: float) -> Fleet | None:
    """Return on rank 0 the facts from all processes of a job, else None. Raises ``UserError`` if they cannot connect.

    ``timeout_s`` is how long each rank tries to reach the store, and how long rank 0 waits for the others after it has
    read its own host. These read theirs at the same time, so it only covers how much later and slower they are.
    """
    if not launch.gathers:
        return _read_alone(launch, system, plan)
    # Do this first: importing torch changes the environment, and in some builds the CPU affinity.
    member = _Member(launch, system, plan, timeout_s)
    try:
        with meet(launch, system.env, timeout_s) as meeting:
            # Elsewhere rank 0 serves the store, so it has everything that it has acknowledged.
            return member.take_part(meeting.begin("fleet"), ends_last=launch.launcher is Launcher.TORCHRUN)
    except StoreError as error:
        place = f"{launch.hosts[0]}:{launch.port}"
        if launch.launcher is Launcher.TORCHRUN:
            what = f"rank {launch.rank} cannot use the store of torchrun at {place}: {error}"
            advice = "Check MASTER_ADDR and MASTER_PORT, name resolution and firewalls between this host and that one."
        elif launch.rank == 0:
            what = f"the ranks cannot connect: {error}"
            advice = "Choose another --master-port, or start a new step, which gets another port."
        else:
            what = f"rank {launch.rank} cannot reach rank 0 at {place}: {error}"
            advice = f"Is the command running on rank 0's host? Does a firewall there close port {launch.port}?"
        advice += " Without a launcher, ddpdoctor check-env checks this host alone."
        raise UserError(what, help=advice, status=ExitStatus.INCONCLUSIVE) from error


def gather_over(conversation: Conversation, launch: Launch, system: System, plan: ReadingPlan) -> Fleet | None:
    """Do the same in an open conversation, for a program whose ranks continue together. Raises ``StoreError``."""
    if not launch.gathers:
        return _read_alone(launch, system, plan)
    return _Member(launch, system, plan, SLOWEST_S).take_part(conversation, ends_last=False)


def _read_alone(launch: Launch, system: System, plan: ReadingPlan) -> Fleet:
    node = read_node(system, plan, (read_process(system),))
    return Fleet(nodes=(node,), launcher=launch.launcher, world_size=launch.world_size, nnodes=launch.nnodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """Rank 0 has received everything, or has stopped waiting."""


class _Member:
    """A participating process with its settings."""

    def __init__(self, launch: Launch, system: System, plan: ReadingPlan, timeout_s: float) -> None:
        self.launch, self.system, self.plan, self.timeout_s = launch, system, plan, timeout_s
        self.process = read_process(system, rank=launch.rank, local_rank=launch.local_rank)
        self.identity = read_identity(system)

    def facts(self, node: Node | None) -> Facts:
        return Facts(
            rank=self.launch.rank,
            machine=self.identity.machine,
            container=self.identity.container,
            process=self.process,
            node=None if node is None else replace(node, processes=()),
            host=self.identity.host,
            version=ddpdoctor.__version__,
        )

    def take_part(self, conversation: Conversation, *, ends_last: bool) -> Fleet | None:
        """Lead, or follow and return None. If two processes are rank 0 by mistake, one of them leads.

        ``ends_last``: so does rank 0. If it ended first with status 1, torchrun would stop the others.
        """
        rank = self.launch.rank
        conversation.send(f"hello/{rank}", Hello(host=self.identity.host, pid=self.process.pid))
        if rank == 0 and conversation.add("leaders", 1) == 1:
            try:
                return self._lead(conversation)
            finally:
                if ends_last:
                    with suppress(StoreError):
                        conversation.say_goodbye(_Done(), lambda: conversation.add("arrived", 0), LEAVE_LIMIT_S)
        facts = self.facts(self._read_own_node(conversation) if self.launch.reads_node else None)
        conversation.send(f"facts/{conversation.add('arrived', 1)}", facts)
        if ends_last:
            # This process has sent everything. If rank 0 is gone, no goodbye is needed.
            with suppress(StoreError):
                conversation.hear_goodbye(_Done, self.timeout_s, ends_process=True)
        return None

    def _lead(self, conversation: Conversation) -> Fleet:
        fqdn: str | None = None
        if "names" in self.plan.sections:
            fqdn = ask_one(self.system.calls.fqdn, FQDN_LIMIT_S).value
        conversation.send("head", Head(fqdn=fqdn))
        with shown_clock(conversation):
            node = read_node(self.system, replace(self.plan, head=fqdn), (self.process,))
            facts, problems, silent_hosts = self._hear(conversation)
        return replace(assemble(self.launch, [self.facts(node), *facts], problems), silent_hosts=silent_hosts)

    def _read_own_node(self, conversation: Conversation) -> Node:
        # The lookups on this host need rank 0's name. Rank 0 shows its clock right after it sends its name.
        head = conversation.wait(Head, "head", self.timeout_s, "rank 0")
        plan = replace(self.plan, head=None if head is None else head.fqdn)
        if "clock" not in plan.sections:
            return read_node(self.system, plan, (self.process,))
        offsets: list[float | None] = [None]

        def measure() -> None:
            with suppress(StoreError):  # without an offset, the check of the clocks uses the kernel's state
                offsets.append(measure_offset(conversation))

        measuring = threading.Thread(target=measure, name="ddpdoctor-offset", daemon=True)
        measuring.start()
        node = read_node(self.system, plan, (self.process,))
        measuring.join()
        if isinstance(node.clock, Unread):
            return node
        return replace(node, clock=replace(node.clock, offset_s=offsets[-1]))

    def _hear(self, conversation: Conversation) -> tuple[list[Facts], list[str], tuple[str, ...]]:
        """Receive facts until all are there or the time is up. Return problems too, and hosts that only said hello."""
        facts: list[Facts] = []
        problems: list[str] = []
        hellos: dict[int, Hello] = {}
        expected = self.launch.world_size - 1

        def arrivals() -> range:
            # More arrivals than expected are a launch error. The limit keeps this loop finite.
            return range(1, min(conversation.add("arrived", 0), 2 * expected + 16) + 1)

        def have_spoken(heard: Mapping[int, Facts]) -> bool:
            facts[:] = heard.values()
            return len(facts) + len(problems) >= expected

        try:
            conversation.gather(
                Facts, "facts", arrivals, self.timeout_s, is_over=have_spoken,
                on_bad=lambda _, error: problems.append(f"one process sent {error.what}"),
            )  # fmt: skip
            missing = missing_ranks(self.launch, [self.facts(None), *facts])
            for rank in missing[:MOST_NAMED]:
                with suppress(BadRecord):
                    if (hello := conversation.get(Hello, f"hello/{rank}", f"rank {rank}")) is not None:
                        hellos[rank] = hello
            problems += describe_missing(missing, hellos, self.timeout_s)
        except StoreError as error:
            problems.append(f"collecting ended early: {error}")
        if turned_away := conversation.turned_away():
            strangers = f"{turned_away} connections without this job's token were turned away"
            problems.append(f"{strangers}: is DDPDOCTOR_TOKEN the same on all nodes?")
        return facts, problems, tuple(dict.fromkeys(hello.host for hello in hellos.values()))


class MachineReader:
    """Reads the machines of a bench when called. Rank 0 keeps them in ``fleet``; on other ranks it stays None."""

    def __init__(self, launch: Launch, env: Mapping[str, str]) -> None:
        self._launch, self._env = launch, env
        self.fleet: Fleet | None = None

    def __call__(self, conversation: Conversation) -> None:
        """Take part in the reading. Every rank must call this. Raises ``StoreError``."""
        plan = ReadingPlan(sections=SECTIONS_FOR_BENCH, use_torch=False)
        self.fleet = gather_over(conversation.part("machines/"), self._launch, System(env=self._env), plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Each process sends this as soon as it reaches the store, so it can be named if it sends nothing more."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Rank 0 sends this to the others: the full name of its host, if known."""

    fqdn: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts from one process."""

    rank: int  # the rank among the gathering processes
    machine: str
    container: str
    process: NodeProcess
    node: Node | None  # Set only by the process that reads its host. It has no processes.
    host: str
    version: str  # the version of ddpdoctor


def assemble(launch: Launch, facts: Sequence[Facts], problems: Iterable[str] = ()) -> Fleet:
    """Return the fleet of these processes, sorted by rank. Two with the same rank are both kept for a check."""
    arrived = sorted(facts, key=lambda fact: fact.rank)
    groups = []
    for machine in grouped((fact.machine, fact) for fact in arrived).values():
        # Processes that share kernel, network and host name are split by container. A container is a separate node only
        # if one of its processes reads the host: under Apptainer, each task has its own mounts, and all tasks belong to
        # the one that reads.
        parts = list(grouped((fact.container, fact) for fact in machine).values())
        readers = [part for part in parts if any(fact.node for fact in part)]
        if len(readers) < 2:
            groups.append(machine)
            continue
        rest = [fact for part in parts if part not in readers for fact in part]
        groups += [sorted([*readers[0], *rest], key=lambda fact: fact.rank), *readers[1:]]
    groups.sort(key=lambda group: group[0].rank)
    nodes = []
    for index, group in enumerate(groups):
        host = group[0].host
        node = next((fact.node for fact in group if fact.node is not None), None)
        if node is None:
            unread = Unread(why=Why.TIMEOUT, reason=f"the process on {host} that reads the host did not answer")
            sections: dict[str, Any] = dict.fromkeys(SECTIONS, unread)
            node = Node(host=host, **sections)
        nodes.append(replace(node, index=index, processes=tuple(fact.process for fact in group)))
    times = Counter(node.host for node in nodes)
    others = grouped((fact.version, fact.rank) for fact in facts if fact.version != ddpdoctor.__version__)
    return Fleet(
        nodes=tuple(
            node if times[node.host] == 1 else replace(node, host=f"{node.host} (rank {group[0].rank})")
            for node, group in zip(nodes, groups, strict=True)
        ),
        launcher=launch.launcher,
        world_size=launch.world_size,
        nnodes=launch.nnodes,
        missing=missing_ranks(launch, facts),
        problems=(
            *problems,
            *(
                f"{rank_list(ranks)}: ddpdoctor {version}, and {ddpdoctor.__version__} on rank 0"
                for version, ranks in others.items()
            ),
        ),
    )


def missing_ranks(launch: Launch, facts: Iterable[Facts]) -> tuple[int, ...]:
    return tuple(sorted(set(range(launch.world_size)) - {fact.rank for fact in facts}))


def describe_missing(missing: Sequence[int], hellos: Mapping[int, Hello], limit_s: float) -> tuple[str, ...]:
    started = [
        f"rank {rank} ({hellos[rank].host}, process {hellos[rank].pid}) started but did not answer within {limit_s:g} s"
        for rank in missing
        if rank in hellos
    ]
    unheard = [rank for rank in missing if rank not in hellos]
    if unheard:
        started.append(f"no message from {rank_list(unheard)} within {limit_s:g} s")
    return tuple(started)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEnvOptions:
    """The user's options."""

    checks: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    deep: bool = False
    use_torch: bool = True
    redact: bool = False
    expect_version: tuple[str, ...] = ()  # versions that every node should have: "torch==2.13.*"
    alone: bool = False  # check this machine only, also in a process that a launcher started
    timeout_s: float = 30.0
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    command: tuple[str, ...] = ()
    torch_child: ChildProcess | None = None  # a child process that has already started to import torch


def list_checks(wanted: CheckEnvOptions) -> list[str]:
    rules = choose_rules(wanted.checks, wanted.skip)
    width = max(len(rule.kind) for rule in rules)
    return [
        f"{rule.code}  {rule.kind:<{width}}  {rule.severity.value:<7}  {rule.group:<9}  {rule.reads}".rstrip()
        for rule in rules
    ]


def read_expected(text: str) -> ExpectedVersion:
    """Read "torch==2.13.*". Raises ``UserError`` for an unknown name or no version specifier."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    name, specifier = re.fullmatch(r"\s*([A-Za-z]*)\s*(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if name.lower() not in VERSION_OF:
        raise UserError(
            f"--expect-version is {text!r}, which names an unknown component", help=f"Known: {', '.join(VERSION_OF)}."
        )
    try:
        known = str(SpecifierSet(specifier))
    except InvalidSpecifier:
        known = ""
    if not known:
        raise UserError(
            f"--expect-version is {text!r}, which is not a version", help="Example: torch==2.13.* or driver>=550."
        )
    return ExpectedVersion(name=name.lower(), specifier=known)


def check_environment(wanted: CheckEnvOptions, env: Mapping[str, str]) -> Report | None:
    """Check this machine, or those of the job; return None on ranks that do not report. Raises ``UserError``."""
    started_at = now()
    for text in wanted.expect_version:
        read_expected(text)
    launch = Launch() if wanted.alone else seen_launch(
        env, nnodes=wanted.nnodes, node_rank=wanted.node_rank, master_addr=wanted.master_addr,
        master_port=wanted.master_port,
    )  # fmt: skip
    rules = choose_rules(wanted.checks, wanted.skip)
    use_torch, child = wanted.use_torch, wanted.torch_child
    plan = ReadingPlan(sections=sections_of(rules), deep=wanted.deep, use_torch=use_torch, torch_child=child)
    fleet = gather(launch, System(env=env), plan, wanted.timeout_s)
    return None if fleet is None else build_checkup(fleet, rules, wanted, started_at, env)


def build_checkup(
    fleet: Fleet, rules: Iterable[Rule], wanted: CheckEnvOptions, started_at: str, env: Mapping[str, str]
) -> Report:
    fleet = replace(fleet, expected=tuple(map(read_expected, wanted.expect_version)))
    data = {
        "hosts": [node.host for node in fleet.nodes],
        "launcher": fleet.launcher.value,
        "world_size": fleet.world_size,
        "missing_ranks": list(fleet.missing),
        "gathering": list(fleet.problems),
        "nodes": fleet.nodes,
    }
    report = check_report(rules, fleet_facts(fleet), data, wanted.command, started_at)
    return redact(report, fleet, env) if wanted.redact else report
