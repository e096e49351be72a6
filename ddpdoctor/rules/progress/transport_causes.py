"""Why data do not get through: what to check first, by backend and number of hosts, and what was found there.

The machine is judged by the rules of `check-env` themselves, so that both say the same about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.node import Fleet
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import grouped, rank_list
from ddpdoctor.rules.engine import fleet_facts, judge
from ddpdoctor.rules.interface_choice import choose
from ddpdoctor.rules.registry import rules_of

from ddpdoctor.rules.progress.clues import Clue
from ddpdoctor.rules.progress.nodes import machines_of
from ddpdoctor.rules.progress.stalled import TIMING
from ddpdoctor.rules.progress.words import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.facts import Connections
    from ddpdoctor.model.node import Network, Node

    from ddpdoctor.rules.progress.groups import Group
    from ddpdoctor.rules.progress.job_state import JobState

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


def transport_clues(job: JobState, group: Group) -> tuple[Clue, ...]:
    """Return what was seen, the strongest evidence first: connections, the machine, NCCL's lines, time-out messages."""
    found = [*_down_interfaces(job), *_stalled_connections(job)]
    likely = likely_causes(job, group)
    for machine in machines_of(job.facts):
        found += _machine(machine, likely)
    found += [
        Clue(said=f"NCCL warns{_source(line.source)}: {line.text}") for line in job.facts.nccl_lines[-MOST_LINES:]
    ]
    found += _texts(job)
    return (*found, *_ways(job))


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


def lose_packets(job: JobState) -> bool:
    """Return whether a rank's data are resent again and again without an acknowledgment."""
    return any(True for _ in _stalled_connections(job))


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
