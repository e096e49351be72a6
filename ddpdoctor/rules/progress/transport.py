"""DD608 and DD611: ranks that wait only for each other, in a circle or in a collective that does not complete."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import DeviceState
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.node import Fleet
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import grouped, rank_list, verb
from ddpdoctor.rules.answers import Answer, judged, passed, skipped, unknown
from ddpdoctor.rules.engine import fleet_facts, judge
from ddpdoctor.rules.network import choose
from ddpdoctor.rules.progress import waits as wt
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import Cause, machines_of
from ddpdoctor.rules.progress.states import WORK_WAIT, Activity, first_line, places
from ddpdoctor.rules.progress.wait_causes import find_late, is_limit_over
from ddpdoctor.rules.progress.words import Clue, fix_of
from ddpdoctor.rules.registry import rule, rules_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from ddpdoctor.model.facts import Connections
    from ddpdoctor.model.findings import Place
    from ddpdoctor.rules.progress.job_state import JobState

TIMING = "TORCH_NCCL_ENABLE_TIMING=1"
# What is not known about the devices of ranks, or known from times only, and how to find out the next time.
_UNKNOWN = {
    DeviceState.UNKNOWN: f"it is unknown whether the kernels of {{who}} have started: set {TIMING} to find out",
    DeviceState.UNTIMED: "it is unknown whether the kernels of {who} have started: nccl2, which is NCCL's backend in "
    f"torch 2.15, does not report it; set TORCH_DIST_USE_NCCL2=0 and {TIMING} to find out",
    DeviceState.UNTOLD: "the devices of {who} still have work; under DETAIL this torch does not report whether "
    "that is this call or a kernel after it: --debug-level OFF does",
    DeviceState.GIVEN_UP: "{who} continued to the next call when the timeout of this one had passed, and then a "
    "thread without Python ended a process with SIGABRT, as torch's watchdog does; under DETAIL this torch does not "
    "dump the pending calls: --debug-level OFF does",
}
MOST_NAMED = 6  # most links of a circle, and most circles, that a sentence names
MOST_GROUPS = 4  # most groups that a summary names
Targets = dict[int, frozenset[int]]  # for each waiting rank, the ranks that it waits for
_MEET = (
    "both the send and the recv were called: give them the same tag, group and size; otherwise check the network "
    "between the two ranks, or raise --hang-timeout if it is just slow"
)
MOST_LINES = 4  # most lines of NCCL's log, and most stalled connections, that are shown
_NAMES = ("DD211", "DD212", "DD201", "DD202", "DD203")
_GPUS = ("DD311", "DD328", "DD322", "DD321", "DD323", "DD320")
_VARIABLES = ("DD115", "DD112", "DD114")
_RDMA = ("DD331", "DD333", "DD334", "DD335", "DD336", "DD337", "DD338", "DD339", "DD332")
# ProcessGroupNCCL.cpp: "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, …)".
_WATCHDOG = re.compile(r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:.{0,200}?, Timeout\(ms\)=(?P<limit>\d+))?")
# gloo/transport/*/unbound_buffer.cc.
_GLOO = re.compile(r"Timed out waiting (?P<limit>\d+)ms for (?P<what>send|recv) operation to complete")
# What to check, the likeliest cause first, by backend and whether the job has several hosts: codes of `check-env`'s
# rules, and steps for the user.
_CODES = {
    ("gloo", False): ("DD218", *_NAMES),
    ("gloo", True): (*_NAMES, "DD218", "DD206"),
    ("nccl", False): (*_GPUS, *_VARIABLES, "DD121"),
    ("nccl", True): (*_NAMES, *_RDMA, "DD218", *_GPUS, *_VARIABLES),
}
_STEPS = {
    ("gloo", False): "1. packet filters, including on loopback (nft list ruleset; iptables-save); 2. the interface "
    "that the connections use (ip -s link show); 3. GLOO_SOCKET_IFNAME",
    ("gloo", True): "1. the interface that Gloo uses (GLOO_SOCKET_IFNAME, the address of the host name); 2. firewalls "
    "between the hosts, for all ports, not only MASTER_PORT; 3. MTU: small messages pass, large ones do not (ping "
    "-M do -s 8972 HOST); 4. the link (ip -s link show)",
    ("nccl", False): "1. GPU errors (dmesg | grep Xid); 2. copies between GPUs: NCCL_P2P_DISABLE=1 helps if ACS or the "
    "IOMMU blocks them; 3. shared memory: NCCL_SHM_DISABLE=1; 4. NVLink and the fabric manager (nvidia-smi nvlink -s)",
    ("nccl", True): "1. the interface that NCCL uses (NCCL_SOCKET_IFNAME); 2. InfiniBand or RoCE (NCCL_IB_HCA, "
    "NCCL_IB_GID_INDEX): if NCCL_IB_DISABLE=1 helps, the fault is there; 3. firewalls between the hosts, for all "
    "ports; 4. GPU errors (dmesg | grep Xid)",
}


def closed(job: JobState) -> tuple[int, ...] | None:
    """Return the waiting ranks if none waits for an outside rank and nothing else explains the wait, else None."""
    waits = job.waits
    if job.cause is not Cause.HANG or not waits.waiters or waits.blockers or (waits.absent and job.sees_all):
        return None
    frozen = any(state.doing is Activity.STOPPED for state in job.states.values())
    return None if frozen or find_late(job) else waits.waiters


def stalled_in(job: JobState) -> tuple[wt.CallPosition, ...]:
    """Return the pending collectives that all ranks of their group have reached: the earliest one of each group."""
    # A rank may be done with it and wait in a later one: the root of a broadcast returns before the data have arrived.
    positions = sorted(job.positions.items())
    by_group = grouped((position.group, number) for number, position in positions if number in position.group.members)
    found = []
    for group, inside in by_group.items():
        waited_in = {job.positions[number] for number in inside}
        # It must be certain in which collective each rank is; the counter of C++ may be off by one.
        certain = all(job.positions[n].seq is not None and job.states[n].doing is Activity.COLLECTIVE for n in inside)
        if len(inside) == len(group.members) and (len(waited_in) == 1 or certain):
            found.append(min(waited_in, key=lambda position: position.seq or 0))
    return tuple(found)


def queued_behind(job: JobState) -> tuple[int, ...]:
    found = []
    for position in stalled_in(job):
        states = _device_states(job, (position,))
        if DeviceState.STARTED in states.values():
            found += [number for number, state in states.items() if state is DeviceState.SCHEDULED]
    return tuple(sorted(found))


def _device_states(job: JobState, stalled: Iterable[wt.CallPosition]) -> dict[int, DeviceState | None]:
    groups = {position.group for position in stalled}
    inside = (n for n, position in sorted(job.positions.items()) if position.group in groups)
    calls = ((number, job.states[number].call) for number in inside)
    return {number: call.device_state for number, call in calls if call is not None}


def find_targets(job: JobState) -> Targets:
    """Return for each waiting rank the ranks that its call lacks. Ranks that wait for unknown ranks are left out."""
    # If ranks wait in calls that do not match, each side waits for the blamed one. Ranks in the same call share one
    # set.
    edges = wt.wait_edges(job.states, job.positions)
    absent = frozenset(range(job.world)) - job.states.keys()
    lacking: dict[Hashable, frozenset[int]] = {}
    for node, nexts in edges.items():
        if isinstance(node, int):
            continue
        missing = absent.intersection(node.group.members if isinstance(node, wt.CallPosition) else ())
        ranks = frozenset(peer for peer in nexts if isinstance(peer, int))
        earlier = (lacking.get(peer, frozenset()) for peer in nexts if not isinstance(peer, int))
        lacking[node] = ranks.union(missing, *earlier)
    found: Targets = {}
    for rank, nexts in edges.items():
        for peer in nexts if isinstance(rank, int) else ():
            whom = frozenset({peer}) if isinstance(peer, int) else lacking.get(peer, frozenset())
            if isinstance(rank, int) and whom:
                found[rank] = whom
    if needed := frozenset(wt.needed_in_init(job.states, job.world)):
        found |= {rank: needed for rank, state in job.states.items() if state.doing is Activity.INIT}
    if job.conflict is not None:
        blamed = frozenset(job.conflict.blame.ranks)
        waiting = [n for part in job.conflict.parts if (n := part.rank) in job.states and job.states[n].waiting]
        sides = dict.fromkeys((n for n in waiting if n not in blamed), blamed)
        sides = sides or {n: blamed - {n} for n in waiting if blamed - {n}}
        found = {**sides, **found}
    return found or {rank: frozenset({peer}) for rank, peer in wt.waiting_peers(job.states, met=True).items()}


@rule("DD608", "deadlock", Severity.ERROR, "Ranks wait for each other in a circle")
def check_deadlock(job: JobState) -> Answer:
    """Report ranks that wait for each other in a circle."""
    waiters = closed(job)
    if waiters is None:
        return skipped("a rank that waits for no other rank is holding up the job, or no rank is waiting")
    if stalled_in(job):
        return skipped("some ranks are in a collective that its whole group has called")
    circles = wt.find_circles(job.states, job.positions)
    # Pairs of ranks of which one sends what the other waits to receive are circles of two.
    peers = {} if circles else wt.waiting_peers(job.states, met=True)
    both = [(rank, peer) for rank, peer in sorted(peers.items()) if rank < peer]
    pairs = tuple(wt.WaitCircle(ranks=pair, links=(pair, pair[::-1])) for pair in both)
    if not circles and not pairs and len({position.group for position in job.positions.values()}) < 2:
        return passed()
    if not job.stands_still(()) or not set(waiters) <= job.quiet:
        return unknown("some ranks are still making progress")
    named = circles or pairs
    blamed = tuple(sorted(n for circle in named for n in circle.ranks)) or waiters
    among = {position.group for position in job.positions.values()}
    around = []  # "rank 0 is waiting in recv for rank 1, which is waiting in barrier for rank 0"
    for circle in named[:MOST_NAMED]:
        parts = []
        for waiter, awaited in circle.links[:MOST_NAMED]:
            call, position = job.states[waiter].call, job.positions.get(waiter)
            what = "a call" if call is None else call.api or call.op
            of = f" of {wt.group_words(position.group, job.world, among)}" if position is not None else ""
            parts.append(f"is waiting in {what}{of} for rank {awaited}")
        left = len(circle.links) - len(parts)
        more = f", and so on through {left} more ranks back to rank {circle.ranks[0]}" if left else ""
        around.append(f"rank {circle.ranks[0]} " + ", which ".join(parts) + more)
    where: tuple[Place, ...] = ()
    for n in blamed:  # the line of the call, and for an asynchronous call the line that waits for it
        opened = job.ranks[n].open_calls
        waits = [call.site for call in opened if call.op == WORK_WAIT and call.thread_is_main]
        where += places(n, [say.line_at(job.states[n]), *waits])
    found = say.problem_of(
        job,
        blamed,
        ": ".join([f"{say.who(job, blamed)} are waiting for each other", *around[:1]]),
        where=where,
        evidence=(*around[1:], *say.all_classes(job, blamed)),
        fix="use groups and peers in the same order on all ranks",
    )
    # A rank that waits in a call which a device has not completed: its host may be free to go on.
    calls = [job.states[n].call for circle in circles for n in circle.ranks if job.states[n].waiting]
    on_device = any(call is not None and call.device_state is not None for call in calls)
    if on_device:
        found = replace(found, confidence=Confidence.MEDIUM)
    if not circles or job.may_have_come:
        found = replace(found, confidence=Confidence.LOW, fix=_MEET if pairs else found.fix)
    return judged([found], certain=bool(circles) and not job.may_have_come, may_resume=on_device)


def _has_several_hosts(job: JobState) -> bool:
    return job.facts.nnodes > 1 or len({job.ranks[number].host for number in job.states}) > 1


def _stalled_connections(job: JobState) -> Iterator[Clue]:
    owner = {end: number for number, links in _connections(job).items() for end in links.ends}
    ends = _connections(job).items()
    every = ((number, connection) for number, connections in ends for connection in connections.stalled)
    for number, link in islice(every, MOST_LINES):
        peer = owner.get(link.remote)
        to = f"rank {peer}" if peer is not None else "a process outside this host or container"
        here, there = link.local.rpartition(":")[0], link.remote.rpartition(":")[0]
        way = f"between {here} and {there}" if here != there else f"from {here} to itself"
        yield Clue(
            said=f"data from rank {number} to {to} is not acknowledged: {link.local} to {link.remote}, "
            f"{link.unsent_bytes} bytes are waiting, resent {link.retries} times",
            fix=f"packets {way} are lost: check the packet filters (nft list ruleset; iptables-save) and "
            "the link (ip -s link show)",
        )


def _interface_clues(job: JobState) -> tuple[list[Clue], list[Clue]]:
    # The user should first compare the latter with the intended ones.
    down, ways = [], []
    several = _has_several_hosts(job)
    networks = [(node, network) for node in machines_of(job.facts) if (network := known(node.network)) is not None]
    for at, (machine, network) in enumerate(networks):
        on = f"on {machine.host}: " if several else ""
        ends = _connections(job).items()
        here = [found for number, found in ends if not several or job.ranks[number].host == machine.host]
        addresses = dict.fromkeys(address for found in here for address, _ in found.by_address)
        own = [(card, {text.partition("/")[0] for text in card.addresses}) for card in network.interfaces]
        carriers = [(nic, address) for address in addresses for nic, texts in own if address.strip("[]") in texts]
        down += [
            Clue(
                f"{on}the ranks' connections use {nic.name} ({address}), which is down",
                f"ip link set dev {nic.name} up, or choose another interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
            )
            for nic, address in carriers
            if not nic.running
        ]
        down += [
            Clue(
                f"{on}the ranks' connections use {address}, but no interface has that address anymore",
                f"find out what removed {address}: a DHCP client, a network manager, or an interface that went down",
            )
            for address in addresses
            if not any(address.strip("[]") in texts for _, texts in own) and not address.startswith("127.")
        ]
        if at < MOST_LINES:
            used = ", ".join(sorted({f"{nic.name} ({address})" for nic, address in carriers}))
            ways += [Clue(f"{on}the ranks' TCP connections use {used}")] if used else []
            ways.append(Clue(f"{on}{choose(machine, network)}"))
            chains = known(network.firewall) or ()
            ways += [Clue(f"{on}a packet filter drops by default: {chain.name}, {chain.refusal}") for chain in chains]
    return down, ways


def _given_up(message: str) -> str | None:
    watchdog = _WATCHDOG.search(message)
    if watchdog is not None:
        limit = f" after {int(watchdog['limit']) / 1000:.0f} s" if watchdog["limit"] else ""
        return f"the NCCL watchdog gave up on {watchdog['op']}, collective {watchdog['seq']} of its group{limit}"
    gloo = _GLOO.search(message)
    return f"Gloo gave up: {first_line(gloo[0])}" if gloo is not None else None


def _clues_of(job: JobState, codes: Iterable[str]) -> tuple[Clue, ...]:
    # The machine is judged by the rules of `check-env` themselves, so that both say the same about it.
    down, ways = _interface_clues(job)
    found = [*down, *_stalled_connections(job)]
    rules = {rule.code: rule for rule in rules_of("environment")}
    for machine in machines_of(job.facts):
        facts = fleet_facts(Fleet(nodes=(machine,)))
        found += [
            Clue(f"on {machine.host}: {finding.summary} ({code})", finding.fix)
            for code in codes
            for finding in judge([rules[code]], facts).findings
            if TIMING not in finding.summary  # it moves no data, and is what tells that the kernels have started
        ]
    for line in job.facts.nccl_lines[-MOST_LINES:]:
        source = f" ({line.source})" if line.source else ""
        found.append(Clue(f"NCCL warns{source}: {line.text}"))
    texts = ((_given_up(error.message), number) for number in sorted(job.states) for error in job.ranks[number].raised)
    said = grouped((text, number) for text, number in texts if text is not None)
    found += [Clue(f"{rank_list(numbers)}: {text}") for text, numbers in list(said.items())[:MOST_LINES]]
    return (*found, *ways)


def _connections(job: JobState) -> dict[int, Connections]:
    causes = ((number, job.ranks[number].causes) for number in sorted(job.states))
    return {number: seen.connections for number, seen in causes if seen is not None and seen.connections is not None}


@rule("DD611", "transport", Severity.ERROR, "All ranks are in the same collective, but it does not complete")
def check_transport(job: JobState) -> Answer:
    """Report a collective that all ranks have reached but that does not complete."""
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
    group = stalled[0].group
    states = [wt.own_state(job.ranks[member], group.name) for member in group.members if member in job.states]
    backend = "nccl" if any(state is not None and "nccl" in state.backend.lower() for state in states) else "gloo"
    path = backend, _has_several_hosts(job)
    clues = _clues_of(job, _CODES[path])
    inside = grouped((position, number) for number, position in sorted(job.positions.items()))
    said = []
    for position in stalled[:MOST_GROUPS]:
        ranks = inside[position]
        number = f"collective {position.seq}" if position.seq is not None else "one collective"
        who = f"all {len(ranks)} ranks" if len(ranks) == len(job.waits.waiters) > 1 else rank_list(ranks)
        come = "" if len(ranks) == len(position.group.members) else ", which the whole group has called"
        said.append(f"{who} {verb(ranks, 'is', 'are')} in {number} of group {position.group.name}{come}")
    left = len(stalled) - len(said)
    more = f"; {left} more groups" if left else ""
    devices = _device_states(job, stalled)
    by_state = grouped((state, number) for number, state in devices.items())
    finding = say.problem_of(
        job,
        blamed,
        f"{'; '.join(said)}{more}, but {'it does' if len(stalled) == 1 else 'they do'} not complete",
        confidence=Confidence.MEDIUM if any(clue.fix for clue in clues) else Confidence.LOW,
        where=tuple(place for n in blamed for place in places(n, [say.line_at(job.states[n])])[:1]),
        evidence=(
            *(clue.said for clue in clues),
            *(words.format(who=rank_list(by_state[state])) for state, words in _UNKNOWN.items() if state in by_state),
            *say.all_classes(job, blamed),
        ),
        fix=fix_of(clues, f"check in this order: {_STEPS[path]}"),
    )
    loses_packets = any(True for _ in _stalled_connections(job))
    computing = any(job.states[n].doing is Activity.NATIVE for n in waiters) and not loses_packets
    # All are surely inside if each kernel has started, or if the host itself waits in the call.
    begun = all(state in (None, DeviceState.STARTED) for state in devices.values())
    runs = begun or (is_limit_over(job) and DeviceState.UNTOLD not in by_state)
    return judged([finding], certain=runs and not computing, may_resume=True)
