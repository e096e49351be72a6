"""Reads only this machine, or gathers the facts from all processes of a job on rank 0.

Every process says hello, one process per host reads the host, all send their facts, and rank 0 combines them. NCCL and
Gloo are not used, because they may be the broken part.

Keys: ``leaders``, ``head``, ``clock``, ``hello/RANK``, ``arrived``, ``facts/ARRIVAL``.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ddpdoctor
from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.launch import read_identity, read_process, seen_ranks
from ddpdoctor.collect.system import SECTIONS_FOR_BENCH, ReadingPlan, System, read_node
from ddpdoctor.diagnose.assembly import Facts, Head, Hello, assemble, describe_missing, missing_ranks
from ddpdoctor.exchange.clocks import ShownClock, measure_offset
from ddpdoctor.exchange.conversation import BadRecord
from ddpdoctor.exchange.meeting import meet
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.node import Fleet, Launcher
from ddpdoctor.model.reading import Unread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.launch import Identity
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.node import Node, NodeProcess

FQDN_LIMIT_S = 2.0
LEAVE_LIMIT_S = 2.0
SLOWEST_S = 30.0
"""Our choice: how much longer than rank 0 another host may take to read if all processes have already met."""
MOST_NAMED = 64
"""For how many ranks without an answer their hello is looked up."""


def find_launch(env: Mapping[str, str]) -> Launch:
    """Return the job of this process. Without a launcher, it is a job of one rank."""
    return seen_ranks(env)


def read_fleet(system: System, plan: ReadingPlan) -> Fleet:
    """Read only this machine."""
    return Fleet(nodes=(read_node(system, plan, (read_process(system),)),))


def gather(launch: Launch, system: System, plan: ReadingPlan, timeout_s: float) -> Fleet | None:
    """Return the facts from all processes of a job on rank 0, and None on the other ranks.

    ``timeout_s`` is how long rank 0 waits for the slowest rank after it has read its own host. The others read theirs
    at the same time, so it only covers how much later they started and how much slower they are. It is also how long
    each rank tries to reach the store. Ranks that do not answer in time are named, and the rest is reported.

    Raises ``UserError`` if the store cannot be reached.
    """
    if not launch.gathers:
        return _read_alone(launch, system, plan)
    # Do this first: importing torch changes the environment, and in some builds the CPU affinity.
    member = _member(launch, system, plan, timeout_s)
    try:
        with meet(launch, system.env, timeout_s) as meeting:
            conversation = meeting.begin("fleet")
            if launch.launcher is not Launcher.TORCHRUN:
                # Rank 0 serves the store, so it has everything that it has acknowledged.
                return _take_part(member, conversation)
            return _end_together(member, conversation)
    except StoreError as error:
        raise _unreachable(launch, error) from error


def gather_over(conversation: Conversation, launch: Launch, system: System, plan: ReadingPlan) -> Fleet | None:
    """Do the same in an open conversation, for a program whose ranks go on together afterwards.

    Raises ``StoreError``.
    """
    if not launch.gathers:
        return _read_alone(launch, system, plan)
    return _take_part(_member(launch, system, plan, SLOWEST_S), conversation)


def _read_alone(launch: Launch, system: System, plan: ReadingPlan) -> Fleet:
    alone = read_fleet(system, plan)
    return replace(alone, launcher=launch.launcher, world_size=launch.world_size, nnodes=launch.nnodes)


def _member(launch: Launch, system: System, plan: ReadingPlan, timeout_s: float) -> _Member:
    return _Member(
        launch=launch,
        system=system,
        plan=plan,
        timeout_s=timeout_s,
        process=read_process(system, rank=launch.rank, local_rank=launch.local_rank),
        identity=read_identity(system),
    )


def _take_part(member: _Member, conversation: Conversation) -> Fleet | None:
    """Lead or follow. Return None on followers."""
    if _leads(member, conversation):
        return _lead(member, conversation)
    _follow(member, conversation)
    return None


def _end_together(member: _Member, conversation: Conversation) -> Fleet | None:
    """Take part, and let rank 0 end last. If it ended first with status 1, torchrun would stop the others."""
    if _leads(member, conversation):
        try:
            return _lead(member, conversation)
        finally:
            with suppress(StoreError):
                conversation.say_goodbye(_Done(), lambda: conversation.add("arrived", 0), LEAVE_LIMIT_S)
    _follow(member, conversation)
    # This process has sent everything. If rank 0 is gone, no goodbye is needed.
    with suppress(StoreError):
        conversation.hear_goodbye(_Done, member.timeout_s, ends_process=True)
    return None


def _leads(member: _Member, conversation: Conversation) -> bool:
    """Say hello and return whether this process leads. If two processes are rank 0 by mistake, one of them leads."""
    rank = member.launch.rank
    conversation.send(f"hello/{rank}", Hello(host=member.identity.host, pid=member.process.pid))
    return rank == 0 and conversation.add("leaders", 1) == 1


def _follow(member: _Member, conversation: Conversation) -> None:
    facts = member.facts(_read_own_node(member, conversation) if member.launch.reads_node else None)
    conversation.send(f"facts/{conversation.add('arrived', 1)}", facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """Rank 0 has received everything, or has stopped waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A participating process with its settings."""

    launch: Launch
    system: System
    plan: ReadingPlan
    timeout_s: float
    process: NodeProcess
    identity: Identity

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


def _lead(member: _Member, conversation: Conversation) -> Fleet:
    """Publish this host's name and clock, read this host, and receive the facts of the others."""
    plan = replace(member.plan, head=_read_fqdn(member))
    conversation.send("head", Head(fqdn=plan.head))
    with ShownClock(conversation):
        node = read_node(member.system, plan, (member.process,))
        gathered = _hear(member, conversation)
    fleet = assemble(member.launch, [member.facts(node), *gathered.facts], gathered.problems)
    return replace(fleet, silent_hosts=gathered.silent_hosts)


def _read_own_node(member: _Member, conversation: Conversation) -> Node:
    # The lookups on this host need rank 0's name. Rank 0 shows its clock right after it sends its name.
    head = conversation.wait(Head, "head", member.timeout_s, "rank 0")
    plan = replace(member.plan, head=None if head is None else head.fqdn)
    if "clock" not in plan.sections:
        return read_node(member.system, plan, (member.process,))
    offset = _Offset(conversation)
    offset.start()
    node = read_node(member.system, plan, (member.process,))
    offset.join()
    if isinstance(node.clock, Unread):
        return node
    return replace(node, clock=replace(node.clock, offset_s=offset.seconds))


class _Offset(threading.Thread):
    """Measures the clock's offset while the node is read."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(name="ddpdoctor-offset", daemon=True)
        self._conversation = conversation
        self.seconds: float | None = None

    def run(self) -> None:
        # Without an offset, the check of the clocks uses the kernel's state.
        with suppress(StoreError):
            self.seconds = measure_offset(self._conversation)


def _read_fqdn(member: _Member) -> str | None:
    if "names" not in member.plan.sections:
        return None
    return ask_side_by_side({"fqdn": member.system.calls.fqdn}, FQDN_LIMIT_S)["fqdn"].value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    facts: tuple[Facts, ...]
    problems: tuple[str, ...]
    silent_hosts: tuple[str, ...]


def _hear(member: _Member, conversation: Conversation) -> _Gathered:
    """Receive facts until all ranks have sent theirs or the time is up. If the store is lost, keep what arrived."""
    facts: list[Facts] = []
    problems: list[str] = []
    hellos: Mapping[int, Hello] = {}
    expected = member.launch.world_size - 1

    def arrivals() -> range:
        # More arrivals than expected are a launch error. The limit keeps this loop finite.
        return range(1, min(conversation.add("arrived", 0), 2 * expected + 16) + 1)

    def have_spoken(heard: Mapping[int, Facts]) -> bool:
        facts[:] = heard.values()
        return len(facts) + len(problems) >= expected

    try:
        conversation.gather(
            Facts, "facts", arrivals, member.timeout_s, is_over=have_spoken,
            on_bad=lambda _, error: problems.append(f"one process sent {error.what}"),
        )  # fmt: skip
        missing = missing_ranks(member.launch, [member.facts(None), *facts])
        hellos = _look_for_hellos(conversation, missing[:MOST_NAMED])
        problems += describe_missing(missing, hellos, member.timeout_s)
    except StoreError as error:
        problems.append(f"the gathering ended early: {error}")
    if turned_away := conversation.turned_away():
        strangers = f"{turned_away} connections without this job's token were turned away"
        problems.append(f"{strangers}: is DDPDOCTOR_TOKEN the same on all nodes?")
    silent_hosts = tuple(dict.fromkeys(hello.host for hello in hellos.values()))
    return _Gathered(facts=tuple(facts), problems=tuple(problems), silent_hosts=silent_hosts)


def _look_for_hellos(conversation: Conversation, ranks: tuple[int, ...]) -> Mapping[int, Hello]:
    found: dict[int, Hello] = {}
    for rank in ranks:
        with suppress(BadRecord):
            hello = conversation.get(Hello, f"hello/{rank}", f"rank {rank}")
            if hello is not None:
                found[rank] = hello
    return found


def _unreachable(launch: Launch, error: StoreError) -> UserError:
    """Return the error for a rank that could not take part, with advice."""
    place = f"{launch.hosts[0]}:{launch.port}"
    if launch.launcher is Launcher.TORCHRUN:
        what = f"rank {launch.rank} cannot use the store of torchrun at {place}: {error}"
        advice = "Check MASTER_ADDR and MASTER_PORT, name resolution and firewalls between this host and that one."
    elif launch.rank == 0:
        what = f"the ranks cannot meet: {error}"
        advice = "Choose another --master-port, or start the step again: a new step has another port."
    else:
        what = f"rank {launch.rank} cannot reach rank 0 at {place}: {error}"
        advice = f"Is the command running on rank 0's host? Does a firewall there close port {launch.port}?"
    return UserError(
        what,
        help=f"{advice} Without a launcher, ddpdoctor check-env checks this host alone.",
        status=ExitStatus.INCONCLUSIVE,
    )


class MachineReader:
    """Reads the machines of a bench when called. Rank 0 keeps them in ``fleet``; on other ranks it stays None."""

    def __init__(self, launch: Launch, env: Mapping[str, str]) -> None:
        self._launch, self._env = launch, env
        self.fleet: Fleet | None = None

    def __call__(self, conversation: Conversation) -> None:
        """Take part in the reading. Every rank must call this. Raises ``StoreError``."""
        plan = ReadingPlan(sections=SECTIONS_FOR_BENCH, use_torch=False)
        self.fleet = gather_over(conversation.part("machines/"), self._launch, System(env=self._env), plan)
