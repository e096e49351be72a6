"""DD205, DD206 and DD217: the address and port of the store."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import name_list
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.rendezvous import by_torchrun, endpoints, is_loopback, text_of
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.launch import FIRST_HOST_OF_SLURM, count_nodes, ranks_of
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.network import Names
    from ddpdoctor.model.node import Fleet, Node, NodeProcess
    from ddpdoctor.model.rendezvous import Endpoint

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
    found = _all_endpoints(node)
    if not found:
        return skipped(NO_ADDRESS)
    numeric = [_numeric(process, endpoint) for process, endpoint in found if _DIGITS.fullmatch(endpoint.host)]
    return judged(numeric, _seen(found))


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
        return _own_name(given, differs=differs)
    return _looked_up_to_loopback(host, names)


def _own_name(given: Given, *, differs: bool) -> str | None:
    """Judge the name of a node that is not the first.

    With c10d any node may be the endpoint's host. But it is wrong if each node gives its own name, or if the variables
    already number the ranks or nodes: then only number 0 listens.
    """
    if differs:
        return f"is the host's own name, but rank 0 is on another host: {_NOBODY}"
    numbered = any(text_of(given.process, name) for name in ("RANK", "PET_NODE_RANK"))
    if numbered and given.endpoint.variable != "PET_RDZV_ENDPOINT":
        return f"is {given.endpoint.host}, but rank 0 is on another host: {_NOBODY}"
    return None


def _looked_up_to_loopback(host: str, names: Names) -> str | None:
    looked_up = names.master.addresses if names.master is not None and names.master.name == host else ()
    if looked_up and all(is_loopback(address) for address in looked_up):
        return f"is {host}, which resolves to {looked_up[0]} there: {_ITSELF}"
    return None


def _elsewhere(fleet: Fleet, how: str, those: list[Given], evidence: str) -> Problem:
    endpoint = those[0].endpoint
    return Problem(
        summary=f"{endpoint.variable} {how}",
        evidence=(evidence,),
        fix=f"export {endpoint.variable}={_right_value(fleet, endpoint)} on all nodes",
        severity=Severity.WARNING if _may_be_meant(fleet, those) else None,
        ranks=ranks_of(one.process for one in those),
        hosts=tuple(dict.fromkeys(one.node.host for one in those)),
    )


def _may_be_meant(fleet: Fleet, those: list[Given]) -> bool:
    """Say whether an operator may have set it on purpose, for the first node only. An option goes to all nodes."""
    is_option = those[0].endpoint.variable != "MASTER_ADDR"
    return all(one.first for one in those) and not (is_option and fleet.missing)


def _right_value(fleet: Fleet, endpoint: Endpoint) -> str:
    """Return the right value: the first node's name, or a placeholder if it is not known."""
    variables = fleet.nodes[0].first.variables
    if fleet.gathered and len(fleet.nodes) > 1:
        host = fleet.nodes[0].host
    elif "SLURM_JOB_NODELIST" in variables:
        host = FIRST_HOST_OF_SLURM
    else:
        host = "NAME_OF_THE_FIRST_HOST"
    return f"{host}:{endpoint.port or 29500}" if endpoint.variable == "PET_RDZV_ENDPOINT" else host


@rule(
    "DD217", "port-range", Severity.INFO, "Another process may take the store's port",
    group=CheckGroup.NETWORK, needs=("network",),
    reads="MASTER_PORT, PET_MASTER_PORT, PET_RDZV_ENDPOINT, /proc/sys/net/ipv4/ip_local_port_range",
)  # fmt: skip
def check_port_range(node: Node) -> Answer:
    """Report a fixed port for the store that the kernel may hand out to any other connection, or that needs root."""
    ports = _chosen_ports(node)
    if not ports:
        return skipped("no port is set for the store: " + _why_no_port(node))
    local = need(node.network).local_ports
    problems = [problem for name, port in ports for problem in _port_problems(name, port, local)]
    kernel = f"; ephemeral ports are {local[0]} to {local[1]}" if local is not None else ""
    return judged(problems, ", ".join(f"{name}={port}" for name, port in ports) + kernel)


def _chosen_ports(node: Node) -> list[tuple[str, int]]:
    """Return the ports that somebody chose and on which nothing listens yet."""
    found: dict[tuple[str, int], None] = {}
    for process in node.processes:
        if by_torchrun(process):
            continue
        ports = {name: process.number(name) for name in ("MASTER_PORT", "PET_MASTER_PORT")}
        for endpoint in endpoints(process):
            if endpoint.variable == "PET_RDZV_ENDPOINT":
                ports[endpoint.variable] = endpoint.port
        found.update({(name, port): None for name, port in ports.items() if port})
    return list(found)


def _why_no_port(node: Node) -> str:
    if any(by_torchrun(process) for process in node.processes):
        return "torchrun is already listening"
    return "MASTER_PORT, PET_MASTER_PORT and PET_RDZV_ENDPOINT are not set"


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


def _all_endpoints(node: Node) -> list[tuple[NodeProcess, Endpoint]]:
    return [(process, endpoint) for process in node.processes for endpoint in endpoints(process)]


def _seen(found: list[tuple[NodeProcess, Endpoint]]) -> str:
    return ", ".join(dict.fromkeys(f"{endpoint.variable}={endpoint.host}" for _, endpoint in found))
