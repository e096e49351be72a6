"""DD201 to DD209 and DD216 to DD218: what hosts resolve their own and rank 0's name to, and the rendezvous address."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model import launch as env
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.words import grouped, name_list
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped, unknown
from ddpdoctor.rules.environment.launch import FIRST_HOST_OF_SLURM, count_nodes, has_several_nodes, ranks_of
from ddpdoctor.rules.majority import compare_nodes, describe, disagreement
from ddpdoctor.rules.network import EPHEMERAL, best_interface, export, is_ignored, open_chain, own_ips, pick_gloo
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.node import Fleet, Lookup, Names, Node, NodeProcess

READS = "gethostname, getaddrinfo, the addresses of all interfaces, GLOO_SOCKET_IFNAME, the number of nodes"


@rule(
    "DD201", "hostname-loopback", Severity.ERROR, "The host name resolves to loopback in a multi-node job",
    after=("iface-up",),
    group=CheckGroup.NETWORK, needs=("names", "network"), reads=READS,
)  # fmt: skip
def check_hostname_loopback(fleet: Fleet) -> Answer:
    """Report a host that resolves its own name to loopback, such as 127.0.0.1 or 127.0.1.1."""
    read = fleet.each(lambda node: node.names)
    if not has_several_nodes(fleet):
        return passed(f"{_all_seen(read)}, on one node")
    problems = []
    for node, names in read:
        own, network = names.own, known(node.network)
        if _has_interface(node) or not own.addresses or _is_foreign(node, own):
            continue
        picks = pick_gloo(node.first, network, own) if network is not None and network.interfaces else None
        if picks[0].ip.is_loopback if picks else all(map(env.is_loopback_address, own.addresses)):
            resolves = f"the host name resolves to {own.addresses[0]} on the host itself"
            summary = f"{resolves}: Gloo sends that address to the other nodes, which then connect to themselves"
            mend = f"replace {own.addresses[0]} with the host's own address in /etc/hosts"
            fix = f"{export('GLOO_SOCKET_IFNAME', network)} on all nodes, or {mend}"
            problems.append(Problem(summary=summary, evidence=(_lookup_words(own),), fix=fix, hosts=(node.host,)))
    return judged(problems, _all_seen(read))


def _all_seen(read: tuple[tuple[Node, Names], ...]) -> str:
    return "; ".join(dict.fromkeys(_lookup_words(names.own) for _, names in read))


def _lookup_words(own: Lookup) -> str:
    return f"{own.name} resolves to {', '.join(own.addresses)}" if own.addresses else f"{own.name}: {own.error}"


def _has_interface(node: Node) -> bool:
    """Say whether an interface is set for Gloo, so that it never looks up the host name."""
    return not is_ignored(node.first.variables.get("GLOO_SOCKET_IFNAME", ""))


@rule(
    "DD202", "hostname-unresolvable", Severity.ERROR, "The host name does not resolve on the host itself",
    after=("rank-set",),
    group=CheckGroup.NETWORK, needs=("names", "network"), reads=READS,
)  # fmt: skip
def check_hostname_unresolvable(fleet: Fleet) -> Answer:
    """Report a host that cannot look up its own name, or not within two seconds."""
    read = fleet.each(lambda node: node.names)
    several = has_several_nodes(fleet)
    consequence, severity = "the ranks cannot find rank 0, and Gloo falls back to loopback", None
    if fleet.launcher is not Launcher.NONE and not several:
        consequence, severity = "Gloo falls back to loopback, which works on one node", Severity.WARNING
    problems = []
    for node, names in read:
        if not names.own.addresses:
            summary = f"the host name {_unresolved_words(names.own)} on the host itself: {consequence}"
            fix = _hosts_line(fleet, node) + ("" if several else "; or, on one node, torchrun --local-addr 127.0.0.1")
            seen, hosts = (_lookup_words(names.own),), (node.host,)
            problems.append(Problem(summary=summary, evidence=seen, fix=fix, severity=severity, hosts=hosts))
    return judged(problems, _all_seen(read))


def _unresolved_words(lookup: Lookup) -> str:
    return "did not resolve within 2 s: a name server does not respond" if lookup.timed_out else "does not resolve"


def _hosts_line(fleet: Fleet, node: Node) -> str:
    """Return a command that gives the host name the address of the best interface.

    For one node it contains the address. For several nodes it finds the address, so that it is the same command on all.
    """
    network, address = known(node.network), "127.0.1.1"
    best = best_interface(network) if network is not None else None
    if best is not None and len(fleet.nodes) > 1:
        address = f"$(ip -o address show {best} | awk '{{print $4}}' | cut -d/ -f1 | head -n 1)"
    elif network is not None and best is not None:
        interface = next(nic for nic in network.interfaces if nic.name == best)
        address = interface.addresses[0].partition("/")[0]
    return f'echo "{address} $(hostname)" | sudo tee -a /etc/hosts'


@rule(
    "DD203", "hostname-not-local", Severity.ERROR, "The host name resolves to an address that is not one of this host",
    after=("hostname-loopback",),
    group=CheckGroup.NETWORK, needs=("names", "network"), reads=READS,
)  # fmt: skip
def check_hostname_not_local(fleet: Fleet) -> Answer:
    """Report a host name whose addresses all belong to other hosts."""
    read = fleet.each(lambda node: node.names)
    consequence = "other ranks connect to the wrong host, and Gloo falls back to loopback"
    summary = f"the host name resolves to an address that no interface of the host has: {consequence}"
    problems = []
    for node, names in read:
        if _is_foreign(node, names.own):
            fix = f"remove the wrong entry from /etc/hosts or DNS, then {_hosts_line(fleet, node)}"
            severity = Severity.WARNING if _has_interface(node) and fleet.launcher is not Launcher.NONE else None
            seen, hosts = (_lookup_words(names.own),), (node.host,)
            problems.append(Problem(summary=summary, evidence=seen, fix=fix, severity=severity, hosts=hosts))
    return judged(problems, _all_seen(read))


def _is_foreign(node: Node, own: Lookup) -> bool:
    """Say whether the host name has addresses and none is this host's. Return False if this host's are not known."""
    local = own_ips(known(node.network))
    found = [ipaddress.ip_address(address.partition("%")[0]) for address in own.addresses]
    return bool(local and found) and not any(address.is_loopback or address in local for address in found)


# Our choice: a healthy name server answers in milliseconds, and torch's store looks up a name for every connection.
SLOW_S = 1.0
RESOLVE_FIRST_HOST = (
    "torchrun --local-addr ADDRESS_OF_THE_FIRST_HOST on the first host, or make the name resolve in DNS or /etc/hosts "
    "of all nodes"
)
FOREVER_S = 2.0  # Look-ups are cut off after this time (collect/network.py)


@rule(
    "DD204", "fqdn-forward", Severity.ERROR, "Another node cannot resolve the full name of rank 0's host",
    after=("master-resolve",),
    group=CheckGroup.NETWORK, needs=("names",),
    reads="socket.getfqdn on rank 0's host, getaddrinfo of it on all others",
)  # fmt: skip
def check_fqdn_forward(fleet: Fleet) -> Answer:
    """Report nodes on which the full name of rank 0's host does not resolve, or resolves to the node itself."""
    if not has_several_nodes(fleet) or len(fleet.nodes) < 2:
        return skipped("no other node was seen")
    found = tuple((node, names.head) for node, names in fleet.each(lambda node: node.names) if names.head is not None)
    if not found:
        return skipped("the full name of rank 0's host is unknown")
    name = found[0][1].name
    problems = []
    for node, lookup in found:
        if lookup.addresses and (node is fleet.nodes[0] or not all(map(env.is_loopback_address, lookup.addresses))):
            continue
        used = fleet.launcher is Launcher.NNODES or env.text_of(node.first, "MASTER_ADDR") == lookup.name
        if lookup.timed_out:
            what_it_is = "does not resolve within 2 s"
        else:
            what_it_is = "resolves to the node itself" if lookup.addresses else "does not resolve"
        reach = "torchrun publishes it as MASTER_ADDR" if used else "torchrun's c10d rendezvous would publish it"
        resolved = lookup.error or f"it resolves to {', '.join(lookup.addresses)}"
        problems.append(Problem(
            summary=f"the full name of rank 0's host {what_it_is} on other nodes: {reach}",
            evidence=(f"the name is {lookup.name}", resolved), fix=RESOLVE_FIRST_HOST,
            severity=None if used else Severity.WARNING, hosts=(node.host,),
        ))  # fmt: skip
    return judged(problems, f"rank 0's host is named {name}; resolved on {len(found)} nodes")


@rule(
    "DD207", "master-resolve", Severity.ERROR, "The master's name does not resolve, or resolves to different hosts",
    after=("rdzv-host",),
    group=CheckGroup.NETWORK, needs=("names", "network"),
    reads="MASTER_ADDR or the host of PET_RDZV_ENDPOINT, getaddrinfo of it on every node",
)  # fmt: skip
def check_master_resolve(fleet: Fleet) -> Answer:
    """Report nodes where the master's name does not resolve, or resolves to a different host than on the others."""
    readings = fleet.each(lambda node: node.names)
    found = tuple((node, read.master) for node, read in readings if read.master is not None)
    if not found:
        return skipped("no MASTER_ADDR and no rendezvous endpoint is given")
    # Other checks handle addresses and localhost.
    names = [lookup.name for _, lookup in found]
    if all(env.parse_address(name) is not None or name.lower() in env.LOOPBACK_NAMES for name in names):
        return passed(f"{names[0]} is an address, not a name")
    problems = []
    for node, lookup in found:
        if not lookup.addresses:
            summary = f"the master's name {_unresolved_words(lookup)}: torch silently retries until its timeout"
            add = "add the name to DNS or /etc/hosts, or set MASTER_ADDR to an address"
            fix, seen = f"run `getent hosts {lookup.name}` on the node; {add}", (f"{lookup.name}: {lookup.error}",)
            problems.append(Problem(summary=summary, evidence=seen, fix=fix, hosts=(node.host,)))
    # Whether the nodes resolve one name to different addresses that are not all rank 0's host
    head, name, said = fleet.nodes[0], names[0], []
    own = {str(ip) for ip in own_ips(known(head.network)) if not (ip.is_loopback or ip.is_link_local)}
    for node, lookup in found:
        if node is not head or not all(map(env.is_loopback_address, lookup.addresses)):
            # All addresses of rank 0's host become a single value.
            meant = {"rank 0's host" if address in own else address for address in lookup.addresses}
            said.append((node, tuple(sorted(meant)) or None))
    split = compare_nodes(said) if len(set(names)) == 1 else None
    if split is not None:
        disjoint = not set.intersection(*(set(side.value) for side in split.sides))
        summary = describe(split, f"{name} resolves to", words=", ".join)
        summary += "" if disjoint else ": connections may go to different hosts"
        fix = f"make {name} resolve to one host in DNS and /etc/hosts on all nodes, or set MASTER_ADDR to an address"
        apart = ((node.host, lookup) for node, lookup in found if node.host in split.hosts)
        evidence = tuple(f"{host}: {', '.join(lookup.addresses)}" for host, lookup in apart)
        severity = None if disjoint else Severity.WARNING
        problems.append(disagreement(split, summary, fix, evidence=evidence, severity=severity))
    each = (f"{lookup.name} resolves to {', '.join(lookup.addresses) or lookup.error}" for _, lookup in found)
    return judged(problems, "; ".join(dict.fromkeys(each)))


@rule(
    "DD209", "rdns-slow", Severity.WARNING, "Name lookups are slow",
    group=CheckGroup.NETWORK, needs=("names",),
    reads="getaddrinfo of the host name and the master, getnameinfo of own addresses",
)  # fmt: skip
def check_rdns_slow(node: Node) -> Answer:
    """Report look-ups that take longer than a second."""
    names = need(node.names)
    lookups = (("host name", names.own), ("master's name", names.master))
    times = {what: lookup.duration_s for what, lookup in lookups if lookup is not None and not lookup.timed_out}
    if names.reverse_s is not None:
        times["names of own addresses"] = names.reverse_s
    slow = {what: duration for what, duration in times.items() if duration > SLOW_S}
    seen = ", ".join(f"{what}: {_seconds(duration)}" for what, duration in times.items())
    if not slow:
        return passed(seen)
    summary = "name lookups take longer than a second, and every connection to torch's store needs one"
    evidence = tuple(f"{what}: {_seconds(duration)}" for what, duration in slow.items())
    server = "set a working name server in /etc/resolv.conf (resolvectl status shows the current ones)"
    return found(summary, seen, evidence=evidence, fix=f"{server}, or add all nodes to /etc/hosts")


def _seconds(duration: float) -> str:
    if duration < 0.1:
        return f"{duration * 1000:.0f} ms"
    return f"{duration:.1f} s" if duration < FOREVER_S else f"no response within {FOREVER_S:.0f} s"


PRIVILEGED_PORTS = 1024  # ports below need root or CAP_NET_BIND_SERVICE (ip(7), net.ipv4.ip_unprivileged_port_start)
_DIGITS = re.compile(r"0[xX][0-9a-fA-F]+|[0-9]+")
NO_ADDRESS = "no store address is set (MASTER_ADDR, PET_MASTER_ADDR, PET_RDZV_ENDPOINT)"
_ITSELF = "every node except the first looks for the store on itself and hangs"
_NOBODY = "ranks look for the store on a host where no process listens"


@rule(
    "DD205", "master-numeric", Severity.ERROR, "MASTER_ADDR is a plain number, which the C library reads as an address",
    group=CheckGroup.NETWORK, needs=(), reads="MASTER_ADDR, PET_MASTER_ADDR, PET_RDZV_ENDPOINT",
)  # fmt: skip
def check_master_numeric(node: Node) -> Answer:
    """Report a `MASTER_ADDR` that is a number, such as the id of a Slurm job."""
    found = [(process, endpoint) for process in node.processes for endpoint in env.endpoints(process)]
    if not found:
        return skipped(NO_ADDRESS)
    problems = []
    for process, endpoint in found:
        number = endpoint.host
        if not _DIGITS.fullmatch(number):
            continue
        read_as = "which is neither a host nor an address"
        with contextlib.suppress(ValueError):  # inet_aton reads decimal, octal after 0, hexadecimal after 0x
            base = 16 if number[:2].lower() == "0x" else 8 if len(number) > 1 and number.startswith("0") else 10
            read_as = f"which is read as the address {ipaddress.IPv4Address(int(number, base))}"
        job = number == env.text_of(process, "SLURM_JOB_ID")
        value = FIRST_HOST_OF_SLURM if "SLURM_JOB_NODELIST" in process.variables else "NAME_OF_RANK_0_HOST"
        port = f":{endpoint.port}" if endpoint.variable == "PET_RDZV_ENDPOINT" and endpoint.port is not None else ""
        summary = f"{endpoint.variable} is {number}, {read_as}: every rank waits for a host that does not exist"
        evidence = ("it is the Slurm job id, SLURM_JOB_ID",) if job else ()
        fix = f"export {endpoint.variable}={value}{port}"
        problems.append(Problem(summary=summary, evidence=evidence, fix=fix, ranks=ranks_of([process])))
    return judged(problems, ", ".join(dict.fromkeys(f"{endpoint.variable}={endpoint.host}" for _, endpoint in found)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An address that a process was given. ``first``: whether its node holds rank 0, or None if that is not known."""

    node: Node
    process: NodeProcess
    endpoint: env.Endpoint
    first: bool | None


@rule(
    "DD206", "master-loopback", Severity.ERROR, "MASTER_ADDR points to the node itself on a node that is not the first",
    after=("master-numeric",),
    group=CheckGroup.NETWORK, needs=("names",),
    reads="MASTER_ADDR, PET_MASTER_ADDR, PET_RDZV_ENDPOINT, the number of nodes, getaddrinfo",
)  # fmt: skip
def check_master_loopback(fleet: Fleet) -> Answer:
    """Report an address of the store that means a different host on every node."""
    by_host = fleet.gathered and len(fleet.nodes) > 1
    given: list[Given] = []
    hosts: dict[str, dict[str, None]] = {}
    for node, process in fleet.processes():
        numbers = [process.number(name) for name in ("GROUP_RANK", "PET_NODE_RANK", "SLURM_NODEID", "RANK")]
        first = next((number == 0 for number in numbers if number is not None), None)
        for endpoint in env.endpoints(process):
            holds_rank_0 = node is fleet.nodes[0] if by_host else first
            given.append(Given(node=node, process=process, endpoint=endpoint, first=holds_rank_0))
            hosts.setdefault(endpoint.variable, {})[endpoint.host] = None
    if not given:
        return skipped(NO_ADDRESS)
    seen = ", ".join(f"{variable}={name_list(tuple(those))}" for variable, those in hosts.items())
    count = count_nodes(fleet)
    if count is None or count.nodes < 2:
        return passed(f"{seen}; the job has one node" if count is not None else f"{seen}; no second node is known")
    judged_ones = ((_what_is_wrong(each, differs=len(hosts[each.endpoint.variable]) > 1), each) for each in given)
    wrong = grouped(
        ((each.endpoint.variable, how), each)
        for how, each in judged_ones
        if how is not None and not (by_host and each.first)
    )
    problems, evidence = [], f"{count.nodes} nodes: {count.source}"
    if by_host:
        host = fleet.nodes[0].host
    else:
        in_slurm = "SLURM_JOB_NODELIST" in fleet.nodes[0].first.variables
        host = FIRST_HOST_OF_SLURM if in_slurm else "NAME_OF_THE_FIRST_HOST"
    for (variable, how), those in wrong.items():
        port = f":{those[0].endpoint.port or 29500}" if variable == "PET_RDZV_ENDPOINT" else ""
        goes_to_all = variable != "MASTER_ADDR" and fleet.missing  # an option of torchrun
        problems.append(Problem(
            summary=f"{variable} {how}",
            evidence=(evidence,),
            fix=f"export {variable}={host}{port} on all nodes",
            severity=Severity.WARNING if all(given.first for given in those) and not goes_to_all else None,
            ranks=ranks_of(given.process for given in those),
            hosts=tuple(dict.fromkeys(given.node.host for given in those)),
        ))  # fmt: skip
    return judged(problems, f"{seen}; {evidence}")


def _what_is_wrong(given: Given, *, differs: bool) -> str | None:
    """Return what is wrong with an address, or None. The host is left out if each node has its own."""
    host, names = given.endpoint.host, known(given.node.names)
    if env.is_loopback(host):
        return f"is {host}, a different host on each node: {_ITSELF}"
    if names is None or given.first is not False:
        return None
    if host in {names.hostname, names.fqdn}:
        # With c10d any node may be the endpoint's host. But it is wrong if each node gives its own name, or if the
        # variables already number the ranks or nodes: then only number 0 listens.
        numbered = any(env.text_of(given.process, name) for name in ("RANK", "PET_NODE_RANK"))
        if differs or (numbered and given.endpoint.variable != "PET_RDZV_ENDPOINT"):
            what = "the host's own name" if differs else host
            return f"is {what}, but rank 0 is on another host: {_NOBODY}"
        return None
    looked_up = names.master.addresses if names.master is not None and names.master.name == host else ()
    if looked_up and all(env.is_loopback(address) for address in looked_up):
        return f"is {host}, which resolves to {looked_up[0]} there: {_ITSELF}"
    return None


@rule(
    "DD217", "port-range", Severity.INFO, "Another process may take the store's port",
    group=CheckGroup.NETWORK, needs=("network",),
    reads="MASTER_PORT, PET_MASTER_PORT, PET_RDZV_ENDPOINT, /proc/sys/net/ipv4/ip_local_port_range",
)  # fmt: skip
def check_port_range(node: Node) -> Answer:
    """Report a fixed port for the store that the kernel may hand out to any other connection, or that needs root."""
    found: dict[tuple[str, int], None] = {}
    for process in node.processes:
        if env.by_torchrun(process):
            continue
        ports = {name: process.number(name) for name in ("MASTER_PORT", "PET_MASTER_PORT")}
        for endpoint in env.endpoints(process):
            if endpoint.variable == "PET_RDZV_ENDPOINT":
                ports[endpoint.variable] = endpoint.port
        found.update({(name, port): None for name, port in ports.items() if port})
    if not found:
        listening = any(env.by_torchrun(process) for process in node.processes)
        why = "MASTER_PORT, PET_MASTER_PORT and PET_RDZV_ENDPOINT are not set"
        return skipped(f"no port is set for the store: {'torchrun is already listening' if listening else why}")
    local = need(node.network).local_ports
    problems = []
    for name, port in found:
        fix = f"export {name}={'HOST:29500' if name == 'PET_RDZV_ENDPOINT' else '29500'}"
        if port < PRIVILEGED_PORTS:
            summary = f"{name} is {port}: only root can listen on ports below {PRIVILEGED_PORTS}"
            problems.append(Problem(summary=summary, fix=fix, severity=Severity.WARNING))
        elif local is not None and local[0] <= port <= local[1]:
            summary = f"{name} is {port}, an ephemeral port: the kernel may give it to another connection first"
            evidence = (f"net.ipv4.ip_local_port_range is {local[0]} to {local[1]}",)
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix))
    kernel = f"; ephemeral ports are {local[0]} to {local[1]}" if local is not None else ""
    return judged(problems, ", ".join(f"{name}={port}" for name, port in found) + kernel)


_PORTS = re.compile(r"\bdports? \{? ?((?:\d+(?:[:-]\d+)?(?:, ?)?)+)")
_OTHER_PROTOCOL = re.compile(r"\b(?:udp|sctp|dccp|igmp|esp|ah|gre|vrrp|ospf|ipv6-frag)\b")
_TCP = re.compile(r"\btcp\b|\bl4proto\b")


@rule(
    "DD216", "port-free", Severity.ERROR, "Another process listens on MASTER_PORT",
    after=("env-range",),
    group=CheckGroup.NETWORK, needs=("network",),
    reads="bind(MASTER_PORT) with and without SO_REUSEADDR, /proc/net/tcp, /proc/*/fd, on the host of rank 0",
)  # fmt: skip
def check_port_free(node: Node) -> Answer:
    """Report a MASTER_PORT that rank 0 cannot listen on."""
    use = need(need(node.network).master_port)
    if use.free and not use.time_wait:
        return passed(f"port {use.port} can be listened on")
    if use.free:
        still = f"connections of an earlier job to MASTER_PORT {use.port} are still in TIME_WAIT"
        summary = f"{still}: this affects programs without SO_REUSEADDR, but not torch's store"
        evidence = (f"port {use.port} can be bound with SO_REUSEADDR, but not without",)
        fix = "nothing, or wait a minute"
        problem = Problem(summary=summary, evidence=evidence, fix=fix, severity=Severity.INFO)
    elif use.owner is None and use.error is not None and "in use" not in use.error:
        summary = f"MASTER_PORT {use.port} cannot be listened on: {use.error}"
        problem = Problem(summary=summary, fix="export MASTER_PORT=29500 on all nodes")
    else:
        pid, another = use.owner_pid, use.port + 1 if use.port < 65535 else 29500
        who = use.owner or "a process that is not visible to this user"
        stop = f"sudo ss -ltnp sport = :{use.port}; end that process" if pid is None else f"kill {pid}"
        problem = Problem(
            summary=f"another process uses MASTER_PORT {use.port}: rank 0 fails with EADDRINUSE",
            evidence=(f"{who}{'' if pid is None else f' (process {pid})'} listens on it",),
            fix=f"{stop}, if it is a leftover process; or export MASTER_PORT={another} on all nodes",
        )
    return judged([problem], f"port {use.port}: {use.error or 'TIME_WAIT'}")


@rule(
    "DD218", "firewall-local", Severity.WARNING, "The host's own firewall blocks other nodes",
    group=CheckGroup.NETWORK, needs=("network",),
    reads="nft list ruleset, iptables-save (as root), ip_local_port_range",
)  # fmt: skip
def check_firewall_local(fleet: Fleet) -> Answer:
    """Report a packet filter that refuses incoming connections from the other nodes."""
    seen, problems = [], []
    readings = fleet.each(lambda node: node.network)
    for node, network in readings:
        if not isinstance(network.firewall, tuple):
            continue
        refusals = ", ".join(f"{chain.name}: {chain.refusal}" for chain in network.firewall)
        seen.append(refusals or "no chain refuses incoming connections")
        low, high = network.local_ports or EPHEMERAL
        for chain in network.firewall:
            if any(_is_wide(accepts, low, high) for accepts in chain.accepts):
                continue
            accepted = tuple(f"it accepts: {rule}" for rule in chain.accepts)
            problems.append(Problem(
                summary=f"the firewall refuses incoming connections ({chain.name}: {chain.refusal}), and no rule "
                f"allows the other nodes on ports {low}-{high}, which NCCL and Gloo use",
                evidence=accepted or ("it accepts nothing from other hosts",), fix=open_chain(chain),
                confidence=Confidence.MEDIUM, hosts=(node.host,),
            ))  # fmt: skip
    if not seen:
        need(readings[0][1].firewall)
    if not has_several_nodes(fleet):
        return passed(f"{'; '.join(dict.fromkeys(seen))}; this does not matter on one node")
    return judged(problems, "; ".join(dict.fromkeys(seen)))


def _is_wide(rule: str, low: int, high: int) -> bool:
    if _OTHER_PROTOCOL.search(rule) and not _TCP.search(rule):
        return False
    ports = _PORTS.search(rule)
    if ports is None:
        return "dport" not in rule
    spans = re.findall(r"(\d+)[:-](\d+)", ports[1])
    return any(int(first) <= low and int(last) >= high for first, last in spans)


# The default of the c10d rendezvous (torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py).
DEFAULT_PORT = 29400


@rule(
    "DD208", "rdzv-host", Severity.ERROR, "No host, or more than one, acts as the rendezvous host",
    after=("master-loopback",),
    group=CheckGroup.NETWORK, needs=("names", "network"),
    reads="PET_RDZV_ENDPOINT, PET_RDZV_BACKEND, PET_RDZV_CONF, MASTER_ADDR, gethostname, getaddrinfo, interfaces",
)  # fmt: skip
def check_rdzv_host(fleet: Fleet) -> Answer:
    """Report a rendezvous endpoint that no host, or more than one, recognizes as itself."""
    processes = [process for _, process in fleet.processes()]
    reasons = {
        "no launcher was seen, and one host cannot decide this": not fleet.gathered,
        "torchrun's rendezvous is over, and its store works": any(map(env.by_torchrun, processes)),
        "one node": len(fleet.nodes) < 2,
        "torchrun does not start these ranks": len(processes) > len(fleet.nodes)
        or any(env.text_of(process, "RANK") for process in processes),
        "is_host in PET_RDZV_CONF selects the host": any(
            "is_host" in env.text_of(process, "PET_RDZV_CONF") for process in processes
        ),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is not None:
        return skipped(reason)
    found: set[env.Endpoint | None] = set()
    for process in processes:
        given = {endpoint.variable: endpoint for endpoint in env.endpoints(process)}
        backend = env.text_of(process, "PET_RDZV_BACKEND")
        if backend == "c10d":
            found.add(given.get("PET_RDZV_ENDPOINT"))
        else:
            found.add(None if backend or env.text_of(process, "PET_NODE_RANK") else given.get("MASTER_ADDR"))
    endpoint = found.pop() if len(found) == 1 else None
    if endpoint is None:
        return skipped("the nodes have no common endpoint (PET_RDZV_ENDPOINT with c10d, MASTER_ADDR)")
    matching = [(node, takes_itself_for(names, endpoint.host)) for node, names in fleet.each(lambda n: n.names)]
    hosts = [node.host for node, matches in matching if matches]
    seen = (
        f"{endpoint.variable}={endpoint.host}, which matches {name_list(hosts) if hosts else 'no host'} by torch's rule"
    )
    if len(hosts) == 1:
        return passed(seen)
    if not hosts and (fleet.missing or any(matches is None for _, matches in matching)):
        return unknown(f"{endpoint.host} matches none of the {len(matching)} known host names")
    return judged([_no_single_host(fleet, endpoint, hosts)], seen)


def takes_itself_for(names: Names, host: str) -> bool | None:
    """Say whether torch on this node recognizes itself as the endpoint's host, or None if that is not known."""
    if host == "localhost" or env.is_loopback_address(host) or host in {names.hostname, names.fqdn}:
        return True
    if names.own.error is not None:
        return None
    looked_up = names.master.addresses if names.master is not None and names.master.name == host else ()
    return bool({*looked_up, host} & {*names.own.addresses})


def _no_single_host(fleet: Fleet, endpoint: env.Endpoint, matching: list[str]) -> Problem:
    severity, if_given = Severity.ERROR, ""
    if endpoint.variable != "PET_RDZV_ENDPOINT":  # then it is only assumed
        if_given = ", if it is what torchrun gets as --rdzv-endpoint"
        many_gpus = any((process.number("SLURM_GPUS_ON_NODE") or 0) > 1 for _, process in fleet.processes())
        severity = Severity.WARNING if many_gpus else Severity.INFO
    first, named = fleet.nodes[0], f"{endpoint.host} in {endpoint.variable}"
    if matching:
        summary = f"{name_list(matching)} all match {named}: each starts its own store{if_given}"
        evidence = ["their names resolve to the same address"]
        severity = max(Severity.WARNING, severity, key=lambda severity: severity.order)
    else:
        summary = f"no host matches {named}: no host starts the store, and all nodes wait{if_given}"
        evidence = [f"compared with the names of {name_list(tuple(node.host for node in fleet.nodes))}"]
        for node in fleet.nodes:
            names, meant = known(node.names), {endpoint.host}
            if names is not None and names.master is not None and names.master.name == endpoint.host:
                meant.update(names.master.addresses)
            if meant & {str(ip) for ip in own_ips(known(node.network))}:
                first = node
                own = f"an interface of {first.host} has the address, but its host name does not resolve to it"
                evidence.insert(0, own)
                break
    return Problem(
        summary=summary,
        evidence=tuple(evidence),
        fix=f"torchrun --rdzv-endpoint={first.host}:{endpoint.port or DEFAULT_PORT} on all nodes, with --rdzv-conf "
        f"is_host=1 on {first.host} and is_host=0 on the others",
        severity=severity,
        hosts=tuple(matching) or (first.host,),
    )
