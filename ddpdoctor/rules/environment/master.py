"""DD205 and DD217: the address and port of the store."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import need
from ddpdoctor.model.rendezvous import by_torchrun, endpoints, text_of
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.processes import FIRST_HOST_OF_SLURM, NO_ADDRESS, ranks_of
from ddpdoctor.rules.registry import Group, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Node, Process
    from ddpdoctor.model.rendezvous import Endpoint

PRIVILEGED_PORTS = 1024
"""Ports below need root or CAP_NET_BIND_SERVICE (ip(7), net.ipv4.ip_unprivileged_port_start)."""

_DIGITS = re.compile(r"0[xX][0-9a-fA-F]+|[0-9]+")


@rule(
    "DD205", "master-numeric", Severity.ERROR, "MASTER_ADDR is a bare number, which the C library takes for an address",
    group=Group.NETWORK, needs=(), reads="MASTER_ADDR, PET_MASTER_ADDR, PET_RDZV_ENDPOINT",
)  # fmt: skip
def check_master_numeric(node: Node) -> Answer:
    """Report a `MASTER_ADDR` that is a number, such as the id of a Slurm job.

    ## What it means

    The C library reads a bare number as an IPv4 address of 32 bits: 6841231 is 0.104.99.143. No look-up fails and
    nothing warns. Every rank tries to reach an address that no host has, until the time limit.

    ## How it is recognized

    The address has only digits, or 0x and hexadecimal digits (inet_aton(3)).

    ## What else looks like it

    Nothing does: a host name of digits only cannot be looked up.

    ## What to do

    Give the name of rank 0's host. Most often somebody put the job's id there instead of a host: `export
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)`.
    """
    found = _all_endpoints(node)
    if not found:
        return skipped(NO_ADDRESS)
    numeric = [_numeric(process, endpoint) for process, endpoint in found if _DIGITS.fullmatch(endpoint.host)]
    return judged(numeric, _seen(found))


def _numeric(process: Process, endpoint: Endpoint) -> Problem:
    address = _as_address(endpoint.host)
    read_as = f"which is read as the address {address}" if address else "which is no host and no address"
    job = endpoint.host == text_of(process, "SLURM_JOB_ID")
    value = FIRST_HOST_OF_SLURM if "SLURM_JOB_NODELIST" in process.variables else "NAME_OF_RANK_0_HOST"
    port = f":{endpoint.port}" if endpoint.variable == "PET_RDZV_ENDPOINT" and endpoint.port is not None else ""
    return Problem(
        summary=f"{endpoint.variable} is {endpoint.host}, {read_as}: every rank waits for a host that does not exist",
        evidence=("it is the id of the Slurm job, SLURM_JOB_ID",) if job else (),
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


@rule(
    "DD217", "port-range", Severity.INFO, "The port of the store may be taken by others",
    group=Group.NETWORK, needs=("network",),
    reads="MASTER_PORT, PET_MASTER_PORT, PET_RDZV_ENDPOINT, /proc/sys/net/ipv4/ip_local_port_range",
)  # fmt: skip
def check_port_range(node: Node) -> Answer:
    """Report a fixed port for the store that the kernel may hand out to any other connection, or that needs root.

    ## What it means

    The kernel gives ports of `ip_local_port_range` (32768 to 60999 by default) to any process that opens a connection.
    A store on one of them fails now and then with "EADDRINUSE", more often on a busy host. Only root may listen on
    ports below 1024.

    ## How it is recognized

    The check compares `MASTER_PORT` of ranks that torchrun did not start, `PET_MASTER_PORT` and the port of
    `PET_RDZV_ENDPOINT` with this machine's range. A port below 1024 is a warning. A port in the range is only an info,
    because frameworks that look for a free port just before they start (Lightning, Accelerate, Ray) get one from that
    range.

    ## What else looks like it

    Under torchrun, `MASTER_PORT` is often a port of this range, but torchrun already listens on it. That is fine. The
    default port, 29500, is below the range.

    ## What to do

    Use a port between 1024 and the start of the range, such as 29500, and a different one for each job on the same
    host. Or let the kernel reserve one: `sysctl net.ipv4.ip_local_reserved_ports=PORT`.
    """
    ports = _chosen_ports(node)
    if not ports:
        return skipped("no port was chosen for the store: " + _why_no_port(node))
    local = need(node.network).local_ports
    problems = [problem for name, port in ports for problem in _port_problems(name, port, local)]
    kernel = f"; the kernel hands out {local[0]} to {local[1]}" if local is not None else ""
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
        return "torchrun listens already"
    return "MASTER_PORT, PET_MASTER_PORT and PET_RDZV_ENDPOINT are not set"


def _port_problems(name: str, port: int, local: tuple[int, int] | None) -> Iterator[Problem]:
    if port < PRIVILEGED_PORTS:
        yield Problem(
            summary=f"{name} is {port}: only root may listen on a port below {PRIVILEGED_PORTS}",
            fix=_port_fix(name),
            severity=Severity.WARNING,
        )
    elif local is not None and local[0] <= port <= local[1]:
        yield Problem(
            summary=f"{name} is {port}, which the kernel may give to any connection before the store listens on it",
            evidence=(f"net.ipv4.ip_local_port_range is {local[0]} to {local[1]}",),
            fix=_port_fix(name),
        )


def _port_fix(name: str) -> str:
    return f"export {name}=HOST:29500" if name == "PET_RDZV_ENDPOINT" else f"export {name}=29500"


def _all_endpoints(node: Node) -> list[tuple[Process, Endpoint]]:
    return [(process, endpoint) for process in node.processes for endpoint in endpoints(process)]


def _seen(found: list[tuple[Process, Endpoint]]) -> str:
    return ", ".join(dict.fromkeys(f"{endpoint.variable}={endpoint.host}" for _, endpoint in found))
