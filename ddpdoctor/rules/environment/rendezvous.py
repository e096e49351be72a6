"""DD208: whether exactly one host recognizes itself as the host of the rendezvous."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import name_list
from ddpdoctor.model.reading import known
from ddpdoctor.model.rendezvous import by_torchrun, endpoints, is_loopback_address, text_of
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.interface_choice import own_ips
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.network import Names
    from ddpdoctor.model.node import Fleet, Node, NodeProcess
    from ddpdoctor.model.rendezvous import Endpoint

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
    reason = _why_no_rendezvous(fleet)
    if reason is not None:
        return skipped(reason)
    endpoint = _rendezvous(fleet)
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


def _why_no_rendezvous(fleet: Fleet) -> str | None:
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
    return next((reason for reason, applies in reasons.items() if applies), None)


def _rendezvous(fleet: Fleet) -> Endpoint | None:
    """Return the endpoint, if all nodes have the same one."""
    found: set[Endpoint | None] = {_endpoint_of(process) for _, process in fleet.processes()}
    return found.pop() if len(found) == 1 else None


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
