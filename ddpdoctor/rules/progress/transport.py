"""DD608 and DD611: ranks that wait only for each other, in a circle or in a collective that does not complete."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import DeviceState
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.node import Fleet
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import grouped, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.engine import fleet_facts, judge
from ddpdoctor.rules.network import choose
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import Cause, machines_of
from ddpdoctor.rules.progress.states import WORK_WAIT, Activity, first_line, places
from ddpdoctor.rules.progress.wait_causes import find_late, is_limit_over
from ddpdoctor.rules.progress.waits import (
    CallPosition,
    by_position,
    find_circles,
    find_met_pairs,
    group_words,
    met_peers,
    needed_in_init,
    wait_edges,
)
from ddpdoctor.rules.progress.words import Clue, fix_of
from ddpdoctor.rules.registry import rule, rules_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from ddpdoctor.model.facts import Connections
    from ddpdoctor.model.node import Network, Node
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.progress.job_state import JobState
    from ddpdoctor.rules.progress.states import RankState
    from ddpdoctor.rules.progress.waits import Group, WaitCircle


def closed(job: JobState) -> tuple[int, ...] | None:
    """Return the waiting ranks if none waits for anybody outside and nothing else explains the wait, else None."""
    waits = job.waits
    if job.cause is not Cause.HANG or not waits.waiters or waits.blockers or (waits.absent and job.sees_all):
        return None
    frozen = any(state.doing is Activity.STOPPED for state in job.states.values())
    return None if frozen or find_late(job) else waits.waiters


def stalled_in(job: JobState) -> tuple[CallPosition, ...]:
    """Return the pending collectives that all ranks of their group have come to: the earliest one of each group.

    A rank may be done with it and wait in a later one: the root of a broadcast returns before the data have arrived.
    """
    positions = sorted(job.positions.items())
    by_group = grouped((one.group, number) for number, one in positions if number in one.group.members)
    found = []
    for group, inside in by_group.items():
        waited_in = {job.positions[number] for number in inside}
        if len(inside) == len(group.members) and (len(waited_in) == 1 or _numbered(job, inside)):
            found.append(min(waited_in, key=lambda position: position.seq or 0))
    return tuple(found)


def _numbered(job: JobState, numbers: Iterable[int]) -> bool:
    """Return whether it is certain in which collective each rank is; the counter of C++ may be off by one."""
    positions, states = job.positions, job.states
    return all(positions[n].seq is not None and states[n].doing is Activity.COLLECTIVE for n in numbers)


TIMING = "TORCH_NCCL_ENABLE_TIMING=1"


def queued_behind(job: JobState) -> tuple[int, ...]:
    """Return the ranks whose device still runs earlier work while another rank's device waits in the collective."""
    found = []
    for position in stalled_in(job):
        states = _device_states(job, (position,))
        if DeviceState.STARTED in states.values():
            found += [number for number, state in states.items() if state is DeviceState.SCHEDULED]
    return tuple(sorted(found))


def device_words(job: JobState, stalled: Iterable[CallPosition]) -> list[str]:
    """Return what is not known about the devices, and how to find out the next time."""
    unknown = [n for n, state in _device_states(job, stalled).items() if state is DeviceState.UNKNOWN]
    if not unknown:
        return []
    who = rank_list(unknown)
    return [f"it is unknown whether the kernels of {who} have started: set {TIMING} to find out"]


def _device_states(job: JobState, stalled: Iterable[CallPosition]) -> dict[int, DeviceState | None]:
    """Return, by rank of the stalled groups, how far its device has come with the call that it waits in."""
    groups = {position.group for position in stalled}
    inside = (n for n, position in sorted(job.positions.items()) if position.group in groups)
    calls = ((number, job.states[number].call) for number in inside)
    return {number: call.device_state for number, call in calls if call is not None}


Targets = dict[int, frozenset[int]]
"""For each waiting rank, the ranks that it waits for."""


def find_targets(job: JobState) -> Targets:
    """Return for each waiting rank the ranks that its call lacks. Ranks that wait for nobody known are left out.

    If ranks wait in calls that do not match, each side waits for the blamed one. Ranks in the same call share one set.
    """
    needed = frozenset(needed_in_init(job.states, job.world))
    inside = (rank for rank, state in job.states.items() if state.doing is Activity.INIT)
    found = _targets_in_calls(job) | (dict.fromkeys(inside, needed) if needed else {})
    found |= {rank: whom for rank, whom in _targets_in_conflict(job).items() if rank not in found}
    return found or {rank: frozenset({peer}) for rank, peer in met_peers(job.states).items()}


def _targets_in_calls(job: JobState) -> Targets:
    edges = wait_edges(job.states, job.positions)
    absent = frozenset(range(job.world)) - job.states.keys()
    lacking: dict[Hashable, frozenset[int]] = {}
    for node, nexts in edges.items():
        if isinstance(node, int):
            continue
        missing = absent.intersection(node.group.members) if absent and isinstance(node, CallPosition) else frozenset()
        ranks = frozenset(one for one in nexts if isinstance(one, int))
        earlier = (lacking.get(one, frozenset()) for one in nexts if not isinstance(one, int))
        lacking[node] = ranks.union(missing, *earlier)
    found: Targets = {}
    for rank, nexts in edges.items():
        for one in nexts if isinstance(rank, int) else ():
            whom = frozenset({one}) if isinstance(one, int) else lacking.get(one, frozenset())
            if isinstance(rank, int) and whom:
                found[rank] = whom
    return found


def _targets_in_conflict(job: JobState) -> Targets:
    """Return the sides of a conflict: the others wait for the blamed ranks; if all are blamed, for each other."""
    if job.conflict is None:
        return {}
    blamed = frozenset(job.conflict.blame.ranks)
    inside = [part.rank for part in job.conflict.parts if part.rank in job.states and job.states[part.rank].waiting]
    others = dict.fromkeys((rank for rank in inside if rank not in blamed), blamed)
    return others or {rank: blamed - {rank} for rank in inside if blamed - {rank}}


MOST_NAMED = 6
"""Most links of a circle, and most circles, that a sentence names."""
_MEET = (
    "both the send and the recv were called: give them the same tag, group and size; otherwise check the network "
    "between the two ranks, or raise --hang-timeout if it is just slow"
)


@rule("DD608", "deadlock", Severity.ERROR, "Ranks wait for each other in a circle")
def check_deadlock(job: JobState) -> Answer:
    """Report ranks that wait for each other in a circle."""
    waiters = closed(job)
    if waiters is None:
        return skipped("a rank that waits for no other rank is holding up the job, or no rank is waiting")
    if stalled_in(job):
        return skipped("some ranks are in a collective that its whole group has called")
    circles = find_circles(job.states, job.positions)
    pairs = () if circles else find_met_pairs(job.states)
    if not circles and not pairs and len({position.group for position in job.positions.values()}) < 2:
        return passed()
    if not job.stands_still(()) or not set(waiters) <= job.quiet:
        return unknown("some ranks are still making progress")
    found = _circle_problem(job, circles or pairs, waiters)
    on_device = any(job.states[n].on_device for circle in circles for n in circle.ranks)
    if on_device:
        found = replace(found, confidence=Confidence.MEDIUM)
    if not circles:
        found = replace(found, confidence=Confidence.LOW, fix=_MEET if pairs else found.fix)
    return judged([found], certain=bool(circles), may_resume=on_device)


def _circle_problem(job: JobState, circles: Sequence[WaitCircle], waiters: tuple[int, ...]) -> Problem:
    blamed = tuple(sorted(n for circle in circles for n in circle.ranks)) or waiters
    summary = f"{say.who(job, blamed)} are waiting for each other"
    around = [_around_words(job, circle) for circle in circles[:MOST_NAMED]]
    return say.problem_of(
        job,
        blamed,
        where=tuple(place for n in blamed for place in places(n, _lines(job.states[n]))),
        summary=f"{summary}: {around[0]}" if around else summary,
        evidence=(*around[1:], *say.classes(job, blamed), *say.others(job, blamed)),
        fix="use groups and peers in the same order on all ranks",
    )


def _lines(state: RankState) -> list[Frame | None]:
    """Return the line of the call, and for an asynchronous call the line that waits for it."""
    waits = [call.site for call in state.rank.open_calls if call.op == WORK_WAIT and call.thread_is_main]
    return [say.line_at(state), *waits]


def _around_words(job: JobState, circle: WaitCircle) -> str:
    """Return "rank 0 is waiting in recv for rank 1, which is waiting in barrier for rank 0"."""
    links = circle.links[:MOST_NAMED]
    parts = [f"is waiting in {_call_words(job, waiter)} for rank {awaited}" for waiter, awaited in links]
    left = len(circle.links) - len(links)
    more = f", and so on through {left} more ranks back to rank {circle.ranks[0]}" if left else ""
    return f"rank {circle.ranks[0]} " + ", which ".join(parts) + more


def _call_words(job: JobState, number: int) -> str:
    """Return the operation as the user typed it, and for a collective its group."""
    call = job.states[number].call
    what = "a call" if call is None else call.api or call.op
    position = job.positions.get(number)
    if position is None:
        return what
    among = {other.group for other in job.positions.values()}
    return f"{what} of {group_words(position.group, job.world, among)}"


MOST_LINES = 4
"""Most lines of NCCL's log, and most stalled connections, that are shown."""
_NAMES = ("DD211", "DD212", "DD201", "DD202", "DD203")
_GPUS = ("DD311", "DD328", "DD322", "DD321", "DD323", "DD320")
_VARIABLES = ("DD115", "DD112", "DD114")
_RDMA = ("DD331", "DD333", "DD334", "DD335", "DD336", "DD337", "DD338", "DD339", "DD332")
_WATCHDOG = re.compile(r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:.{0,200}?, Timeout\(ms\)=(?P<limit>\d+))?")
"""ProcessGroupNCCL.cpp: "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, …)"."""
_GLOO = re.compile(r"Timed out waiting (?P<limit>\d+)ms for (?P<what>send|recv) operation to complete")
"""gloo/transport/*/unbound_buffer.cc."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """What to check for a kind of job, the likeliest cause first."""

    rules: tuple[str, ...]
    """Codes of `check-env`'s rules."""
    steps: tuple[str, ...]
    """The steps for the user."""


_LIKELY = {
    ("gloo", False): Likely(
        rules=("DD218", *_NAMES),
        steps=(
            "packet filters, including on loopback (nft list ruleset; iptables-save)",
            "the interface that the connections use (ip -s link show)",
            "GLOO_SOCKET_IFNAME",
        ),
    ),
    ("gloo", True): Likely(
        rules=(*_NAMES, "DD218", "DD206"),
        steps=(
            "the interface that Gloo uses (GLOO_SOCKET_IFNAME, the address of the host name)",
            "firewalls between the hosts, for all ports and not only MASTER_PORT",
            "MTU: small messages pass, large ones do not (ping -M do -s 8972 HOST)",
            "the link (ip -s link show)",
        ),
    ),
    ("nccl", False): Likely(
        rules=(*_GPUS, *_VARIABLES, "DD121"),
        steps=(
            "GPU errors (dmesg | grep Xid)",
            "copies between GPUs: NCCL_P2P_DISABLE=1 helps if ACS or the IOMMU blocks them",
            "shared memory: NCCL_SHM_DISABLE=1",
            "NVLink and the fabric manager (nvidia-smi nvlink -s)",
        ),
    ),
    ("nccl", True): Likely(
        rules=(*_NAMES, *_RDMA, "DD218", *_GPUS, *_VARIABLES),
        steps=(
            "the interface that NCCL uses (NCCL_SOCKET_IFNAME)",
            "InfiniBand or RoCE (NCCL_IB_HCA, NCCL_IB_GID_INDEX): if NCCL_IB_DISABLE=1 helps, the fault is there",
            "firewalls between the hosts, for all ports",
            "GPU errors (dmesg | grep Xid)",
        ),
    ),
}
"""By backend, and whether the job has several hosts."""


def backend_of(job: JobState, group: Group) -> str:
    """Return "nccl" or "gloo", as the ranks report for the group, or Gloo if none does."""
    named = {
        state.backend.lower()
        for member in group.members
        if member in job.states
        for state in job.rank(member).groups
        if state.name == group.name and state.backend
    }
    return "nccl" if any("nccl" in name for name in named) else "gloo"


def likely_causes(job: JobState, group: Group) -> Likely:
    """Return what to check for the backend of a group."""
    return _LIKELY[backend_of(job, group), _has_several_hosts(job)]


def _has_several_hosts(job: JobState) -> bool:
    return job.facts.nnodes > 1 or len({job.rank(number).host for number in job.states}) > 1


def check_words(likely: Likely) -> str:
    """Return the steps as one sentence."""
    return "check in this order: " + "; ".join(f"{i}. {step}" for i, step in enumerate(likely.steps, start=1))


def _stalled_connections(job: JobState) -> Iterator[Clue]:
    """Report connections on which the kernel keeps resending, and which ranks they join."""
    owner = {end: number for number, one in _connections(job).items() for end in one.ends}
    shown = 0
    for number, connections in _connections(job).items():
        for one in connections.stalled:
            if shown == MOST_LINES:
                return
            shown += 1
            peer = owner.get(one.remote)
            to = f"rank {peer}" if peer is not None else "a process outside this host or container"
            here, there = one.local.rpartition(":")[0], one.remote.rpartition(":")[0]
            way = f"between {here} and {there}" if here != there else f"from {here} to itself"
            yield Clue(
                said=f"data from rank {number} to {to} is not acknowledged: {one.local} to {one.remote}, "
                f"{one.unsent_bytes} bytes are waiting, resent {one.retries} times",
                fix=f"packets {way} are lost: check the packet filters (nft list ruleset; iptables-save) and "
                "the link (ip -s link show)",
            )


def _connections(job: JobState) -> dict[int, Connections]:
    """Return the connections of each rank, as far as they were read."""
    causes = ((number, job.rank(number).causes) for number in sorted(job.states))
    return {number: one.connections for number, one in causes if one is not None and one.connections is not None}


def _on(job: JobState, machine: Node) -> str:
    """Return where something was seen, if there is more than one place."""
    return f"on {machine.host}: " if _has_several_hosts(job) else ""


def _addresses(job: JobState, machine: Node) -> dict[str, int]:
    """Return the addresses that the connections of a host's ranks use, and how many each has."""
    found: dict[str, int] = {}
    several = _has_several_hosts(job)
    for number, connections in _connections(job).items():
        for address, count in connections.by_address if not several or job.rank(number).host == machine.host else ():
            found[address] = found.get(address, 0) + count
    return found


def _networks(job: JobState) -> Iterator[tuple[Node, Network]]:
    for machine in machines_of(job.facts):
        network = known(machine.network)
        if network is not None:
            yield machine, network


def _carriers(job: JobState, machine: Node, network: Network) -> Iterator[tuple[str, str, bool]]:
    """Yield the interfaces of a host that its ranks' connections use: name, address, and whether it runs."""
    for address in _addresses(job, machine):
        for one in network.interfaces:
            own = [text.partition("/")[0] for text in one.addresses]
            if address.strip("[]") in own:
                yield one.name, address, one.running


def _down_interfaces(job: JobState) -> Iterator[Clue]:
    for machine, network in _networks(job):
        yield from _down_on(job, machine, network)


def _down_on(job: JobState, machine: Node, network: Network) -> Iterator[Clue]:
    on = _on(job, machine)
    for name, address, running in _carriers(job, machine, network):
        if not running:
            yield Clue(
                said=f"{on}the ranks' connections use {name} ({address}), which is down",
                fix=f"ip link set dev {name} up, or choose another interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
            )
    here = {text.partition("/")[0] for one in network.interfaces for text in one.addresses}
    gone = [a for a in _addresses(job, machine) if a.strip("[]") not in here and not a.startswith("127.")]
    for address in gone:
        yield Clue(
            said=f"{on}the ranks' connections use {address}, but no interface has that address anymore",
            fix=f"find out what removed {address}: a DHCP client, a network manager, or an interface that went down",
        )


def _machine(node: Node, likely: Likely) -> Iterator[Clue]:
    """Ask the rules of `check-env` that matter for this kind of job, in their order."""
    rules = {rule.code: rule for rule in rules_of("environment")}
    facts = fleet_facts(Fleet(nodes=(node,)))
    for code in likely.rules:
        for found in judge([rules[code]], facts).findings:
            if TIMING in found.summary:  # it moves no data, and is what tells that the kernels have started
                continue
            yield Clue(said=f"on {node.host}: {found.summary} ({code})", fix=found.fix)


def _source(source: str) -> str:
    return f" ({source})" if source else ""


def _texts(job: JobState) -> Iterator[Clue]:
    """Say which collective NCCL's watchdog or Gloo gave up, from the exceptions; equal ones appear once."""
    words_of = ((_text_words(one.message), number) for number in sorted(job.states) for one in job.rank(number).raised)
    said = grouped((words, number) for words, number in words_of if words is not None)
    for words, numbers in list(said.items())[:MOST_LINES]:
        yield Clue(said=f"{rank_list(numbers)}: {words}")


def _text_words(message: str) -> str | None:
    watchdog = _WATCHDOG.search(message)
    if watchdog is not None:
        limit = f" after {int(watchdog['limit']) / 1000:.0f} s" if watchdog["limit"] else ""
        return f"the NCCL watchdog gave up on {watchdog['op']}, collective {watchdog['seq']} of its group{limit}"
    gloo = _GLOO.search(message)
    return f"Gloo gave up: {first_line(gloo[0])}" if gloo is not None else None


def _ways(job: JobState) -> Iterator[Clue]:
    """Say which interfaces are in use or would be: the user should first compare them with the intended ones."""
    for machine, network in list(_networks(job))[:MOST_LINES]:
        on = _on(job, machine)
        used = {f"{name} ({address})" for name, address, _ in _carriers(job, machine, network)}
        if used:
            yield Clue(said=f"{on}the ranks' TCP connections use {', '.join(sorted(used))}")
        yield Clue(said=f"{on}{choose(machine, network)}")
        for chain in known(network.firewall) or ():
            yield Clue(said=f"{on}a packet filter drops by default: {chain.name}, {chain.refusal}")


MOST_GROUPS = 4
"""Most groups that a summary names."""


@rule("DD611", "transport", Severity.ERROR, "All ranks are in the same collective, and it does not complete")
def check_transport(job: JobState) -> Answer:
    """Report a collective that all ranks have come to but that does not end."""
    waiters = closed(job)
    if waiters is None:
        return skipped("a rank that waits for no other rank is holding up the job, or no rank is waiting")
    stalled = stalled_in(job)
    if queued_behind(job):
        return skipped("the devices of some ranks have not started it")
    if not stalled and not job.sees_all:
        return unknown("ranks on other nodes were not seen")
    if not stalled or not job.stands_still(()):
        return passed()
    if not set(waiters) <= job.quiet or not job.waited_long():
        return unknown("some ranks are still making progress")
    blamed = tuple(sorted({member for position in stalled for member in position.group.members}))
    computing = any(job.states[n].doing is Activity.NATIVE for n in waiters) and not any(
        True for _ in _stalled_connections(job)
    )
    finding = _stalled_problem(job, stalled, blamed)
    runs = all(
        state in (None, DeviceState.STARTED) for state in _device_states(job, stalled).values()
    ) or is_limit_over(job)
    return judged([finding], certain=runs and not computing, may_resume=True)


def _one_stalled(job: JobState, position: CallPosition, inside: list[int]) -> str:
    number = f"collective {position.seq}" if position.seq is not None else "one collective"
    who = f"all {len(inside)} ranks" if len(inside) == len(job.waits.waiters) > 1 else rank_list(inside)
    come = "" if len(inside) == len(position.group.members) else ", which the whole group has called"
    return f"{who} {verb(inside, 'is', 'are')} in {number} of group {position.group.name}{come}"


def _stalled_problem(job: JobState, stalled: Sequence[CallPosition], blamed: tuple[int, ...]) -> Problem:
    sites = {n: say.line_at(job.states[n]) for n in blamed}
    group = stalled[0].group
    found = [*_down_interfaces(job), *_stalled_connections(job)]
    likely = likely_causes(job, group)
    for machine in machines_of(job.facts):
        found += _machine(machine, likely)
    found += [
        Clue(said=f"NCCL warns{_source(line.source)}: {line.text}") for line in job.facts.nccl_lines[-MOST_LINES:]
    ]
    found += _texts(job)
    clues = (*found, *_ways(job))
    inside = by_position(job.positions)
    said = [_one_stalled(job, position, inside[position]) for position in stalled[:MOST_GROUPS]]
    left = len(stalled) - len(said)
    more = f"; {left} more groups" if left else ""
    return say.problem_of(
        job,
        blamed,
        confidence=Confidence.MEDIUM if any(clue.fix for clue in clues) else Confidence.LOW,
        where=tuple(place for n, frame in sites.items() for place in places(n, [frame])[:1]),
        summary=f"{'; '.join(said)}{more}, but {'it does' if len(stalled) == 1 else 'they do'} not complete",
        evidence=(
            *(clue.said for clue in clues),
            *device_words(job, stalled),
            *say.classes(job, blamed),
            *say.others(job, blamed),
        ),
        fix=fix_of(clues, check_words(likely_causes(job, group))),
    )
