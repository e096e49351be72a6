"""DD205, DD206, DD208 and DD216 to DD218: the address and port of the store, and the host of the rendezvous."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.launch import by_torchrun, endpoints, is_loopback, is_loopback_address, text_of
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.environment.launch import FIRST_HOST_OF_SLURM, count_nodes, has_several_nodes, ranks_of
from ddpdoctor.rules.network import EPHEMERAL, open_chain, own_ips
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.launch import Endpoint
    from ddpdoctor.model.node import FirewallChain, Fleet, Names, Network, Node, NodeProcess, PortUse


PRIVILEGED_PORTS = 1024
"""Ports below need root or CAP_NET_BIND_SERVICE (ip(7), net.ipv4.ip_unprivileged_port_start)."""

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
    found = [(process, endpoint) for process in node.processes for endpoint in endpoints(process)]
    if not found:
        return skipped(NO_ADDRESS)
    numeric = [_numeric(process, endpoint) for process, endpoint in found if _DIGITS.fullmatch(endpoint.host)]
    return judged(numeric, ", ".join(dict.fromkeys(f"{endpoint.variable}={endpoint.host}" for _, endpoint in found)))


def _numeric(process: NodeProcess, endpoint: Endpoint) -> Problem:
    address = _as_address(endpoint.host)
    read_as = f"which is read as the address {address}" if address else "which is neither a host nor an address"
    job = endpoint.host == text_of(process, "SLURM_JOB_ID")
    value = FIRST_HOST_OF_SLURM if "SLURM_JOB_NODELIST" in process.variables else "NAME_OF_RANK_0_HOST"
    port = f":{endpoint.port}" if endpoint.variable == "PET_RDZV_ENDPOINT" and endpoint.port is not None else ""
    return Problem(
        summary=f"{endpoint.variable} is {endpoint.host}, {read_as}: every rank waits for a host that does not exist",
        evidence=("it is the Slurm job id, SLURM_JOB_ID",) if job else (),
        fix=f"export {endpoint.variable}={value}{port}",
        ranks=ranks_of([process]),
    )


def _as_address(text: str) -> str | None:
    """Return the address that inet_aton reads from a number: decimal, octal after 0, hexadecimal after 0x."""
    try:
        base = 16 if text[:2].lower() == "0x" else 8 if len(text) > 1 and text.startswith("0") else 10
        return str(ipaddress.IPv4Address(int(text, base)))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An address that a process was given. ``first``: whether its node holds rank 0, or None if that is not known."""

    node: Node
    process: NodeProcess
    endpoint: Endpoint
    first: bool | None


@rule(
    "DD206", "master-loopback", Severity.ERROR, "MASTER_ADDR points to the node itself on a node that is not the first",
    after=("master-numeric",),
    group=CheckGroup.NETWORK, needs=("names",),
    reads="MASTER_ADDR, PET_MASTER_ADDR, PET_RDZV_ENDPOINT, the number of nodes, getaddrinfo",
)  # fmt: skip
def check_master_loopback(fleet: Fleet) -> Answer:
    """Report an address of the store that means a different host on every node."""
    given = [
        Given(node=node, process=process, endpoint=endpoint, first=_is_first(fleet, node, process))
        for node, process in fleet.processes()
        for endpoint in endpoints(process)
    ]
    if not given:
        return skipped(NO_ADDRESS)
    hosts = _hosts_by_variable(given)
    seen = ", ".join(f"{variable}={name_list(tuple(those))}" for variable, those in hosts.items())
    count = count_nodes(fleet)
    if count is None or count.nodes < 2:
        return passed(f"{seen}; the job has one node" if count is not None else f"{seen}; no second node is known")
    wrong: dict[tuple[str, str], list[Given]] = {}
    for one in given:
        how = _what_is_wrong(fleet, one, differs=len(hosts[one.endpoint.variable]) > 1)
        if how is not None:
            wrong.setdefault((one.endpoint.variable, how), []).append(one)
    evidence = f"{count.nodes} nodes: {count.source}"
    return judged([_elsewhere(fleet, how, those, evidence) for (_, how), those in wrong.items()], f"{seen}; {evidence}")


def _hosts_by_variable(given: list[Given]) -> dict[str, dict[str, None]]:
    hosts: dict[str, dict[str, None]] = {}
    for one in given:
        hosts.setdefault(one.endpoint.variable, {})[one.endpoint.host] = None
    return hosts


def _is_first(fleet: Fleet, node: Node, process: NodeProcess) -> bool | None:
    """Say whether a node holds rank 0. Return None if that is not known."""
    if fleet.gathered and len(fleet.nodes) > 1:
        return node is fleet.nodes[0]
    numbers = [process.number(name) for name in ("GROUP_RANK", "PET_NODE_RANK", "SLURM_NODEID", "RANK")]
    return next((number == 0 for number in numbers if number is not None), None)


def _what_is_wrong(fleet: Fleet, given: Given, *, differs: bool) -> str | None:
    """Return what is wrong with an address, or None. The host is left out if each node has its own."""
    if given.first and fleet.gathered and len(fleet.nodes) > 1:
        return None
    host, names = given.endpoint.host, known(given.node.names)
    if is_loopback(host):
        return f"is {host}, a different host on each node: {_ITSELF}"
    if names is None or given.first is not False:
        return None
    if host in {names.hostname, names.fqdn}:
        # With c10d any node may be the endpoint's host. But it is wrong if each node gives its own name, or if the
        # variables already number the ranks or nodes: then only number 0 listens.
        if differs:
            return f"is the host's own name, but rank 0 is on another host: {_NOBODY}"
        numbered = any(text_of(given.process, name) for name in ("RANK", "PET_NODE_RANK"))
        if numbered and given.endpoint.variable != "PET_RDZV_ENDPOINT":
            return f"is {given.endpoint.host}, but rank 0 is on another host: {_NOBODY}"
        return None
    looked_up = names.master.addresses if names.master is not None and names.master.name == host else ()
    if looked_up and all(is_loopback(address) for address in looked_up):
        return f"is {host}, which resolves to {looked_up[0]} there: {_ITSELF}"
    return None


def _elsewhere(fleet: Fleet, how: str, those: list[Given], evidence: str) -> Problem:
    endpoint = those[0].endpoint
    # An option goes to all nodes.
    is_option = those[0].endpoint.variable != "MASTER_ADDR"
    variables = fleet.nodes[0].first.variables
    if fleet.gathered and len(fleet.nodes) > 1:
        host = fleet.nodes[0].host
    elif "SLURM_JOB_NODELIST" in variables:
        host = FIRST_HOST_OF_SLURM
    else:
        host = "NAME_OF_THE_FIRST_HOST"
    right_value = f"{host}:{endpoint.port or 29500}" if endpoint.variable == "PET_RDZV_ENDPOINT" else host
    return Problem(
        summary=f"{endpoint.variable} {how}",
        evidence=(evidence,),
        fix=f"export {endpoint.variable}={right_value} on all nodes",
        severity=Severity.WARNING if (all(one.first for one in those) and not (is_option and fleet.missing)) else None,
        ranks=ranks_of(one.process for one in those),
        hosts=tuple(dict.fromkeys(one.node.host for one in those)),
    )


@rule(
    "DD217", "port-range", Severity.INFO, "Another process may take the store's port",
    group=CheckGroup.NETWORK, needs=("network",),
    reads="MASTER_PORT, PET_MASTER_PORT, PET_RDZV_ENDPOINT, /proc/sys/net/ipv4/ip_local_port_range",
)  # fmt: skip
def check_port_range(node: Node) -> Answer:
    """Report a fixed port for the store that the kernel may hand out to any other connection, or that needs root."""
    found: dict[tuple[str, int], None] = {}
    for process in node.processes:
        if by_torchrun(process):
            continue
        ports = {name: process.number(name) for name in ("MASTER_PORT", "PET_MASTER_PORT")}
        for endpoint in endpoints(process):
            if endpoint.variable == "PET_RDZV_ENDPOINT":
                ports[endpoint.variable] = endpoint.port
        found.update({(name, port): None for name, port in ports.items() if port})
    if not found:
        listening = any(by_torchrun(process) for process in node.processes)
        why = "MASTER_PORT, PET_MASTER_PORT and PET_RDZV_ENDPOINT are not set"
        return skipped(f"no port is set for the store: {'torchrun is already listening' if listening else why}")
    local = need(node.network).local_ports
    problems = [problem for name, port in found for problem in _port_problems(name, port, local)]
    kernel = f"; ephemeral ports are {local[0]} to {local[1]}" if local is not None else ""
    return judged(problems, ", ".join(f"{name}={port}" for name, port in found) + kernel)


def _port_problems(name: str, port: int, local: tuple[int, int] | None) -> Iterator[Problem]:
    if port < PRIVILEGED_PORTS:
        yield Problem(
            summary=f"{name} is {port}: only root can listen on ports below {PRIVILEGED_PORTS}",
            fix=_port_fix(name),
            severity=Severity.WARNING,
        )
    elif local is not None and local[0] <= port <= local[1]:
        yield Problem(
            summary=f"{name} is {port}, an ephemeral port: the kernel may give it to another connection first",
            evidence=(f"net.ipv4.ip_local_port_range is {local[0]} to {local[1]}",),
            fix=_port_fix(name),
        )


def _port_fix(name: str) -> str:
    return f"export {name}=HOST:29500" if name == "PET_RDZV_ENDPOINT" else f"export {name}=29500"


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
    return judged([_in_wait(use) if use.free else _taken(use)], f"port {use.port}: {use.error or 'TIME_WAIT'}")


def _in_wait(use: PortUse) -> Problem:
    return Problem(
        summary=f"connections of an earlier job to MASTER_PORT {use.port} are still in TIME_WAIT: this affects "
        "programs without SO_REUSEADDR, but not torch's store",
        evidence=(f"port {use.port} can be bound with SO_REUSEADDR, but not without",),
        fix="nothing, or wait a minute",
        severity=Severity.INFO,
    )


def _taken(use: PortUse) -> Problem:
    if use.owner is None and use.error is not None and "in use" not in use.error:
        return Problem(
            summary=f"MASTER_PORT {use.port} cannot be listened on: {use.error}",
            fix="export MASTER_PORT=29500 on all nodes",
        )
    who = use.owner or "a process that is not visible to this user"
    number = f" (process {use.owner_pid})" if use.owner_pid is not None else ""
    stop = (
        f"kill {use.owner_pid}" if use.owner_pid is not None else f"sudo ss -ltnp sport = :{use.port}; end that process"
    )
    return Problem(
        summary=f"another process uses MASTER_PORT {use.port}: rank 0 fails with EADDRINUSE",
        evidence=(f"{who}{number} listens on it",),
        fix=f"{stop}, if it is a leftover process; or export MASTER_PORT={_another(use.port)} on all nodes",
    )


def _another(port: int) -> int:
    return port + 1 if port < 65535 else 29500


@rule(
    "DD218", "firewall-local", Severity.WARNING, "The host's own firewall blocks other nodes",
    group=CheckGroup.NETWORK, needs=("network",),
    reads="nft list ruleset, iptables-save (as root), ip_local_port_range",
)  # fmt: skip
def check_firewall_local(fleet: Fleet) -> Answer:
    """Report a packet filter that refuses incoming connections from the other nodes."""
    seen, problems, known_of = [], [], 0
    for node, network in fleet.each(lambda node: node.network):
        if isinstance(network.firewall, tuple):
            known_of += 1
            seen.append(
                ", ".join(f"{chain.name}: {chain.refusal}" for chain in network.firewall)
                or "no chain refuses incoming connections"
            )
            problems += [_refuses(node, network, chain) for chain in network.firewall if not _lets_in(chain, network)]
    if not known_of:
        need(fleet.each(lambda node: node.network)[0][1].firewall)
    if not has_several_nodes(fleet):
        return passed(f"{'; '.join(dict.fromkeys(seen))}; this does not matter on one node")
    return judged(problems, "; ".join(dict.fromkeys(seen)))


def _lets_in(chain: FirewallChain, network: Network) -> bool:
    low, high = network.local_ports or EPHEMERAL
    return any(_is_wide(rule, low, high) for rule in chain.accepts)


def _is_wide(rule: str, low: int, high: int) -> bool:
    """Say whether an accepting rule covers TCP and all ports that the kernel hands out."""
    if _OTHER_PROTOCOL.search(rule) and not _TCP.search(rule):
        return False
    ports = _PORTS.search(rule)
    if ports is None:
        return "dport" not in rule
    spans = re.findall(r"(\d+)[:-](\d+)", ports[1])
    return any(int(first) <= low and int(last) >= high for first, last in spans)


def _refuses(node: Node, network: Network, chain: FirewallChain) -> Problem:
    low, high = network.local_ports or EPHEMERAL
    return Problem(
        summary=f"the firewall refuses incoming connections ({chain.name}: {chain.refusal}), and no rule allows the "
        f"other nodes on ports {low}-{high}, which NCCL and Gloo use",
        evidence=tuple(f"it accepts: {rule}" for rule in chain.accepts) or ("it accepts nothing from other hosts",),
        fix=open_chain(chain),
        confidence=Confidence.MEDIUM,
        hosts=(node.host,),
    )


DEFAULT_PORT = 29400
"""The default of the c10d rendezvous (torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py)."""


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
        "torchrun's rendezvous is over, and its store works": any(map(by_torchrun, processes)),
        "one node": len(fleet.nodes) < 2,
        "torchrun does not start these ranks": len(processes) > len(fleet.nodes)
        or any(text_of(process, "RANK") for process in processes),
        "is_host in PET_RDZV_CONF selects the host": any(
            "is_host" in text_of(process, "PET_RDZV_CONF") for process in processes
        ),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is not None:
        return skipped(reason)
    found: set[Endpoint | None] = {_endpoint_of(process) for _, process in fleet.processes()}
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
    problem = _several(fleet, endpoint, hosts) if hosts else _nobody(fleet, endpoint)
    return judged([problem], seen)


def _endpoint_of(process: NodeProcess) -> Endpoint | None:
    given = {endpoint.variable: endpoint for endpoint in endpoints(process)}
    backend = text_of(process, "PET_RDZV_BACKEND")
    if backend == "c10d":
        return given.get("PET_RDZV_ENDPOINT")
    return None if backend or text_of(process, "PET_NODE_RANK") else given.get("MASTER_ADDR")


def takes_itself_for(names: Names, host: str) -> bool | None:
    """Say whether torch on this node recognizes itself as the endpoint's host, or None if that is not known."""
    if host == "localhost" or is_loopback_address(host) or host in {names.hostname, names.fqdn}:
        return True
    if names.own.error is not None:
        return None
    looked_up = names.master.addresses if names.master is not None and names.master.name == host else ()
    return bool({*looked_up, host} & {*names.own.addresses})


def _severity(fleet: Fleet, endpoint: Endpoint) -> Severity:
    if endpoint.variable == "PET_RDZV_ENDPOINT":
        return Severity.ERROR
    many_gpus = any((process.number("SLURM_GPUS_ON_NODE") or 0) > 1 for _, process in fleet.processes())
    return Severity.WARNING if many_gpus else Severity.INFO


def _if_given(endpoint: Endpoint) -> str:
    """Return the condition to add to a message if the endpoint is only assumed."""
    return "" if endpoint.variable == "PET_RDZV_ENDPOINT" else ", if it is what torchrun gets as --rdzv-endpoint"


def _nobody(fleet: Fleet, endpoint: Endpoint) -> Problem:
    owner = next(
        (
            node
            for node in fleet.nodes
            if _meant(node, endpoint.host) & {str(ip) for ip in own_ips(known(node.network))}
        ),
        None,
    )
    first = owner or fleet.nodes[0]
    own_card = f"an interface of {first.host} has the address, but its host name does not resolve to it"
    compared = f"compared with the names of {name_list(tuple(node.host for node in fleet.nodes))}"
    return Problem(
        summary=f"no host matches {endpoint.host} in {endpoint.variable}: no host starts the store, and all nodes "
        f"wait{_if_given(endpoint)}",
        evidence=(own_card, compared) if owner is not None else (compared,),
        fix=_fix(first.host, endpoint),
        severity=_severity(fleet, endpoint),
        hosts=(first.host,),
    )


def _several(fleet: Fleet, endpoint: Endpoint, hosts: list[str]) -> Problem:
    return Problem(
        summary=f"{name_list(hosts)} all match {endpoint.host} in {endpoint.variable}: each starts its own "
        f"store{_if_given(endpoint)}",
        evidence=("their names resolve to the same address",),
        fix=_fix(fleet.nodes[0].host, endpoint),
        severity=max(Severity.WARNING, _severity(fleet, endpoint), key=lambda severity: severity.order),
        hosts=tuple(hosts),
    )


def _fix(host: str, endpoint: Endpoint) -> str:
    port = endpoint.port or DEFAULT_PORT
    return (
        f"torchrun --rdzv-endpoint={host}:{port} on all nodes, with --rdzv-conf is_host=1 on {host} and is_host=0 on "
        "the others"
    )


def _addresses(node: Node) -> set[str]:
    return {str(ip) for ip in own_ips(known(node.network))}


def _meant(node: Node, host: str) -> set[str]:
    """Return the addresses that the endpoint's host may have."""
    names = known(node.names)
    if names is None or names.master is None or names.master.name != host:
        return {host}
    return {host, *names.master.addresses}
