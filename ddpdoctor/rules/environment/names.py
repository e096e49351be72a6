"""DD201 to DD203: what a host resolves its own name to, which is the address that Gloo gives to the other ranks."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import known
from ddpdoctor.model.rendezvous import is_loopback_address
from ddpdoctor.rules.answers import Answer, Problem, judged, passed
from ddpdoctor.rules.environment.launch import has_several_nodes
from ddpdoctor.rules.interface_choice import best_interface, export, is_ignored, own_ips, pick_gloo
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.network import Lookup, Names, Network
    from ddpdoctor.model.node import Fleet, Node

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
    wrong = [(node, names.own) for node, names in read if not _has_interface(node) and _takes_loopback(node, names)]
    return judged([_loopback(*one) for one in wrong], _all_seen(read))


def _all_seen(read: tuple[tuple[Node, Names], ...]) -> str:
    return "; ".join(dict.fromkeys(_seen(names.own) for _, names in read))


def _seen(own: Lookup) -> str:
    return f"{own.name} resolves to {', '.join(own.addresses)}" if own.addresses else f"{own.name}: {own.error}"


def _has_interface(node: Node) -> bool:
    """Say whether an interface is set for Gloo, so that it never looks up the host name."""
    return not is_ignored(node.first.variables.get("GLOO_SOCKET_IFNAME", ""))


def _takes_loopback(node: Node, names: Names) -> bool:
    if not names.own.addresses or _is_foreign(node, names.own):
        return False
    network = known(node.network)
    picks = pick_gloo(node.first, network, names.own) if network is not None and network.interfaces else None
    if picks:
        return picks[0].ip.is_loopback
    return all(map(is_loopback_address, names.own.addresses))


def _loopback(node: Node, own: Lookup) -> Problem:
    return Problem(
        summary=f"the host name resolves to {own.addresses[0]} on the host itself: Gloo sends that address to the "
        "other nodes, which then connect to themselves",
        evidence=(_seen(own),),
        fix=f"{export('GLOO_SOCKET_IFNAME', known(node.network))} on all nodes, or replace {own.addresses[0]} with the "
        "host's own address in /etc/hosts",
        hosts=(node.host,),
    )


@rule(
    "DD202", "hostname-unresolvable", Severity.ERROR, "The host name does not resolve on the host itself",
    after=("rank-set",),
    group=CheckGroup.NETWORK, needs=("names", "network"), reads=READS,
)  # fmt: skip
def check_hostname_unresolvable(fleet: Fleet) -> Answer:
    """Report a host that cannot look up its own name, or not within two seconds."""
    read = fleet.each(lambda node: node.names)
    wrong = [(node, names.own) for node, names in read if not names.own.addresses]
    return judged([_unresolvable(fleet, *one) for one in wrong], _all_seen(read))


def _unresolvable(fleet: Fleet, node: Node, own: Lookup) -> Problem:
    how = "did not resolve within 2 s: a name server does not respond" if own.timed_out else "does not resolve"
    several = has_several_nodes(fleet)
    harmless = fleet.launcher is not Launcher.NONE and not several
    consequence = "the ranks cannot find rank 0, and Gloo falls back to loopback"
    if harmless:
        consequence = "Gloo falls back to loopback, which works on one node"
    return Problem(
        summary=f"the host name {how} on the host itself: {consequence}",
        evidence=(_seen(own),),
        fix=_hosts_line(fleet, node) + ("" if several else "; or, on one node, torchrun --local-addr 127.0.0.1"),
        severity=Severity.WARNING if harmless else None,
        hosts=(node.host,),
    )


def _hosts_line(fleet: Fleet, node: Node) -> str:
    """Return a command that gives the host name the address of the best interface.

    For one node it contains the address. For several nodes it finds the address, so that it is the same command on all.
    """
    network = known(node.network)
    best = best_interface(network) if network is not None else None
    address = _first_address(network, best) if network is not None and best is not None else "127.0.1.1"
    if best is not None and len(fleet.nodes) > 1:
        address = f"$(ip -o address show {best} | awk '{{print $4}}' | cut -d/ -f1 | head -n 1)"
    return f'echo "{address} $(hostname)" | sudo tee -a /etc/hosts'


def _first_address(network: Network, name: str) -> str:
    interface = next(one for one in network.interfaces if one.name == name)
    return interface.addresses[0].partition("/")[0]


@rule(
    "DD203", "hostname-not-local", Severity.ERROR, "The host name resolves to an address that is not one of this host",
    after=("hostname-loopback",),
    group=CheckGroup.NETWORK, needs=("names", "network"), reads=READS,
)  # fmt: skip
def check_hostname_not_local(fleet: Fleet) -> Answer:
    """Report a host name whose addresses all belong to other hosts."""
    read = fleet.each(lambda node: node.names)
    wrong = [(node, names.own) for node, names in read if _is_foreign(node, names.own)]
    return judged([_foreign(fleet, *one) for one in wrong], _all_seen(read))


def _is_foreign(node: Node, own: Lookup) -> bool:
    """Say whether the host name has addresses and none is this host's. Return False if this host's are not known."""
    local = own_ips(known(node.network))
    found = [ipaddress.ip_address(address.partition("%")[0]) for address in own.addresses]
    return bool(local and found) and not any(address.is_loopback or address in local for address in found)


def _foreign(fleet: Fleet, node: Node, own: Lookup) -> Problem:
    harmless = _has_interface(node) and fleet.launcher is not Launcher.NONE
    return Problem(
        summary="the host name resolves to an address that no interface of the host has: other ranks connect to the "
        "wrong host, and Gloo falls back to loopback",
        evidence=(_seen(own),),
        fix=f"remove the wrong entry from /etc/hosts or DNS, then {_hosts_line(fleet, node)}",
        severity=Severity.WARNING if harmless else None,
        hosts=(node.host,),
    )
