"""Reads this machine alone, or gathers what every process of a job has seen on rank 0.

Every process says hello, one process a host reads it, all send what they have, and rank 0 puts it together. Nothing of
this goes over NCCL or Gloo, which may be what is broken.

Keys, below the round: ``leaders``, ``head``, ``clock``, ``hello/RANK``, ``arrived``, ``facts/ARRIVAL`` and ``done``.
The round is raised at the end, so that a second check-env under the same torchrun starts afresh.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ddpdoctor
from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.launch.this_process import read_identity, read_process
from ddpdoctor.collect.node import read_node
from ddpdoctor.diagnose.assembly import assemble, describe_missing, missing_ranks
from ddpdoctor.exchange.facts import Facts, Head, Hello
from ddpdoctor.exchange.framing import BadMessage
from ddpdoctor.exchange.meeting import Meeting
from ddpdoctor.exchange.store import Prefixed, Store, StoreError, wait_for
from ddpdoctor.exchange.ticks import Ticker, measure_offset
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.node import Fleet, Launcher
from ddpdoctor.model.reading import Unread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.collect.launch.this_process import Identity
    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.node import Node, Process

FQDN_LIMIT_S = 2.0
LOOK_EVERY_S = 0.05
LEAVE_LIMIT_S = 2.0
SLOWEST_S = 30.0
"""Ours: how much slower than rank 0 another host may be to read where all have met already."""
MOST_NAMED = 64
"""So many ranks that did not answer are asked for one by one."""


def read_fleet(system: System, plan: ReadingPlan) -> Fleet:
    """Read this machine alone."""
    return Fleet(nodes=(read_node(system, plan, (read_process(system),)),))


def gather(launch: Launch, system: System, plan: ReadingPlan, timeout_s: float) -> Fleet | None:
    """Return what all processes of a job have seen, on rank 0; None on the others, which have then nothing to say.

    ``timeout_s`` is how long rank 0 waits for the slowest once it has read its own host: the others read theirs at the
    same time, so that it covers how much later they started and how much slower they are. It is also how long each
    tries to reach the store. Ranks that do not answer in time are named, and the rest is reported.

    Raises ``UserError`` where the store cannot be reached.
    """
    if not launch.gathers:
        return _read_alone(launch, system, plan)
    # First of all: to import torch changes the environment and the affinity of some builds.
    member = _member(launch, system, plan, timeout_s, Meeting(launch, system.env))
    try:
        with member.meeting, closing(member.meeting.open(timeout_s)) as store:
            gathered = _take_part(member, store)
            if gathered is None:
                return None
            if launch.launcher is Launcher.TORCHRUN:
                _see_off(member, gathered.facts)
            return gathered.fleet
    except StoreError as error:
        raise _unreachable(launch, error) from error


def gather_over(meeting: Meeting, store: Store, launch: Launch, system: System, plan: ReadingPlan) -> Fleet | None:
    """Do the same over a store that is open already, for a program whose ranks go on together afterwards.

    Raises ``StoreError``.
    """
    if not launch.gathers:
        return _read_alone(launch, system, plan)
    gathered = _take_part(_member(launch, system, plan, SLOWEST_S, meeting), store)
    return None if gathered is None else gathered.fleet


def _read_alone(launch: Launch, system: System, plan: ReadingPlan) -> Fleet:
    alone = read_fleet(system, plan)
    return replace(alone, launcher=launch.launcher, world_size=launch.world_size, nnodes=launch.nnodes)


def _member(launch: Launch, system: System, plan: ReadingPlan, timeout_s: float, meeting: Meeting) -> _Member:
    return _Member(
        launch=launch,
        system=system,
        plan=plan,
        timeout_s=timeout_s,
        process=read_process(system, rank=launch.rank, local_rank=launch.local_rank),
        identity=read_identity(system),
        meeting=meeting,
    )


def _take_part(member: _Member, store: Store) -> _Led | None:
    """Lead or follow; None on those that follow."""
    room = Prefixed(store, f"{store.add('round', 0)}/")
    rank = member.launch.rank
    room.set(f"hello/{rank}", member.pack(Hello(host=member.identity.host, pid=member.process.pid)))
    # Where a mistake has made two processes rank 0, one of them leads.
    if rank == 0 and room.add("leaders", 1) == 1:
        return _lead(member, store, room)
    _follow(member, room)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A process that takes part, and what it has to do so."""

    launch: Launch
    system: System
    plan: ReadingPlan
    timeout_s: float
    process: Process
    identity: Identity
    meeting: Meeting

    def pack(self, facts: Facts | Hello | Head) -> bytes:
        return self.meeting.pack(encode(facts))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Led:
    fleet: Fleet
    facts: tuple[Facts, ...]
    """Of the others."""


def _lead(member: _Member, store: Store, room: Prefixed) -> _Led:
    """Show the head's name and clock, read this host, hear the others, and let them go."""
    try:
        plan = replace(member.plan, head=_read_fqdn(member))
        room.set("head", member.pack(Head(fqdn=plan.head)))
        with Ticker(member.meeting, room):
            node = read_node(member.system, plan, (member.process,))
            gathered = _hear(member, room)
    finally:
        with suppress(StoreError):
            store.add("round", 1)
            room.set("done", b"1")
    fleet = assemble(member.launch, [member.facts(node), *gathered.facts], gathered.problems)
    return _Led(fleet=replace(fleet, silent_hosts=gathered.silent_hosts), facts=gathered.facts)


def _follow(member: _Member, room: Prefixed) -> None:
    """Read this host where that is this process's part, send what there is, and wait to be let go."""
    facts = member.facts(_read_own_node(member, room) if member.launch.reads_node else None)
    number = room.add("arrived", 1)
    room.set(f"facts/{number}", member.pack(facts))
    # A hub is in rank 0 itself: it has just acknowledged. The launcher's store is not, and once this has arrived there
    # nothing more can go wrong here: that rank 0 is gone is as good as to be let go.
    if member.launch.launcher is Launcher.TORCHRUN:
        with suppress(StoreError):
            wait_for(room, "done", member.timeout_s)


def _see_off(member: _Member, facts: Sequence[Facts]) -> None:
    """Wait a moment for the ranks beside this one to end: should rank 0 end first, and with 1, torchrun stops them."""
    here = (member.identity.machine, member.identity.container)
    beside = {one.process.pid for one in facts if (one.machine, one.container) == here} - {os.getpid()}
    deadline = time.monotonic() + LEAVE_LIMIT_S
    while any(map(_runs, beside)) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _read_own_node(member: _Member, room: Prefixed) -> Node:
    plan = replace(member.plan, head=_hear_head(member, room))
    if "clock" not in plan.sections:
        return read_node(member.system, plan, (member.process,))
    offset = _Offset(member.meeting, room)
    offset.start()
    node = read_node(member.system, plan, (member.process,))
    offset.join()
    if isinstance(node.clock, Unread):
        return node
    return replace(node, clock=replace(node.clock, offset_s=offset.seconds))


class _Offset(threading.Thread):
    """Measures the clock's offset while the node is read."""

    def __init__(self, meeting: Meeting, room: Prefixed) -> None:
        super().__init__(name="ddpdoctor-offset", daemon=True)
        self._meeting, self._room = meeting, room
        self.seconds: float | None = None

    def run(self) -> None:
        # Without it the check of the clocks goes by what the kernel says.
        with suppress(StoreError):
            self.seconds = measure_offset(self._meeting, self._room)


def _read_fqdn(member: _Member) -> str | None:
    if "names" not in member.plan.sections:
        return None
    return ask_side_by_side({"fqdn": member.system.calls.fqdn}, FQDN_LIMIT_S)["fqdn"].value


def _hear_head(member: _Member, room: Prefixed) -> str | None:
    """Wait for rank 0: its name is what the look-ups of this host are about, and its clock starts then."""
    message = wait_for(room, "head", member.timeout_s)
    if message is None:
        return None
    try:
        return decode(Head, member.meeting.unpack(message)).fqdn
    except (BadMessage, WrongValue) as error:
        raise StoreError(f"rank 0 sent {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    facts: tuple[Facts, ...]
    problems: tuple[str, ...]
    silent_hosts: tuple[str, ...]


def _hear(member: _Member, room: Prefixed) -> _Gathered:
    """Take what arrives until all have spoken or the time is up. Where the store is lost, what has arrived counts."""
    facts: list[Facts] = []
    problems: list[str] = []
    hellos: Mapping[int, Hello] = {}
    expected = member.launch.world_size - 1
    deadline = time.monotonic() + member.timeout_s
    try:
        outstanding: set[int] = set()
        heard = 0
        while len(facts) + len(problems) < expected:
            # More than expected is a mistake of the launch, and is not followed without end.
            count = min(room.add("arrived", 0), 2 * expected + 16)
            outstanding |= set(range(heard + 1, count + 1))
            heard = max(heard, count)
            taken = _take(member, room, outstanding, facts, problems)
            if not taken and time.monotonic() >= deadline:
                break
            if not taken:
                time.sleep(LOOK_EVERY_S)
        missing = missing_ranks(member.launch, [member.facts(None), *facts])
        hellos = _look_for_hellos(member, room, missing[:MOST_NAMED])
        problems += describe_missing(missing, hellos, member.timeout_s)
    except StoreError as error:
        problems.append(f"the gathering ended early: {error}")
    if member.meeting.strangers:
        strangers = f"{member.meeting.strangers} connections without this job's token were turned away"
        problems.append(f"{strangers}: is DDPDOCTOR_TOKEN the same on all nodes?")
    silent_hosts = tuple(dict.fromkeys(hello.host for hello in hellos.values()))
    return _Gathered(facts=tuple(facts), problems=tuple(problems), silent_hosts=silent_hosts)


def _take(member: _Member, room: Prefixed, outstanding: set[int], facts: list[Facts], problems: list[str]) -> bool:
    """Move what has arrived from ``outstanding`` to ``facts`` or ``problems``; say whether anything had."""
    taken = set()
    for number in sorted(outstanding):
        message = room.look(f"facts/{number}")
        if message is None:
            continue
        taken.add(number)
        try:
            facts.append(decode(Facts, member.meeting.unpack(message)))
        except (BadMessage, WrongValue) as error:
            problems.append(f"one process sent {error}")
    outstanding -= taken
    return bool(taken)


def _look_for_hellos(member: _Member, room: Prefixed, ranks: tuple[int, ...]) -> Mapping[int, Hello]:
    found: dict[int, Hello] = {}
    for rank in ranks:
        message = room.look(f"hello/{rank}")
        with suppress(BadMessage, WrongValue):
            if message is not None:
                found[rank] = decode(Hello, member.meeting.unpack(message))
    return found


def _unreachable(launch: Launch, error: StoreError) -> UserError:
    """Return the error of a rank that could not take part, with what to do about it."""
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
