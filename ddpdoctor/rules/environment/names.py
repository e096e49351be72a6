"""DD201 to DD204, DD207 and DD209: what hosts resolve their own name and rank 0's to, and how fast."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.launch import LOOPBACK_NAMES, is_loopback_address, text_of
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import known, need
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.launch import has_several_nodes
from ddpdoctor.rules.majority import Voice, compare, describe
from ddpdoctor.rules.network import best_interface, export, is_ignored, own_ips, pick_gloo
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Fleet, Lookup, Names, Network, Node

    Found = tuple[tuple[Node, Lookup], ...]


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


SLOW_S = 1.0
"""Our choice: a healthy name server answers in milliseconds, and torch's store looks up a name for every connection."""
FOREVER_S = 2.0
"""Look-ups are cut off after this time (collect/network.py)."""


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
    problems = [_no_forward(fleet, node, one) for node, one in found if _is_astray(fleet, node, one)]
    return judged(problems, f"rank 0's host is named {name}; resolved on {len(found)} nodes")


def _is_astray(fleet: Fleet, node: Node, lookup: Lookup) -> bool:
    """Say whether the name does not resolve, or resolves to a node that is not rank 0's."""
    if not lookup.addresses:
        return True
    return node is not fleet.nodes[0] and all(map(is_loopback_address, lookup.addresses))


def _no_forward(fleet: Fleet, node: Node, lookup: Lookup) -> Problem:
    used = fleet.launcher is Launcher.NNODES or text_of(node.first, "MASTER_ADDR") == lookup.name
    if lookup.timed_out:
        what_it_is = "does not resolve within 2 s"
    else:
        what_it_is = "resolves to the node itself" if lookup.addresses else "does not resolve"
    how = (lookup.error,) if lookup.error else (f"it resolves to {', '.join(lookup.addresses)}",)
    return Problem(
        summary=f"the full name of rank 0's host {what_it_is} on other nodes: "
        + ("torchrun publishes it as MASTER_ADDR" if used else "torchrun's c10d rendezvous would publish it"),
        evidence=(f"the name is {lookup.name}", *how),
        fix="torchrun --local-addr ADDRESS_OF_THE_FIRST_HOST on the first host, or make the name resolve in DNS or "
        "/etc/hosts of all nodes",
        severity=None if used else Severity.WARNING,
        hosts=(node.host,),
    )


@rule(
    "DD207", "master-resolve", Severity.ERROR, "The master's name does not resolve, or resolves to different hosts",
    after=("rdzv-host",),
    group=CheckGroup.NETWORK, needs=("names", "network"),
    reads="MASTER_ADDR or the host of PET_RDZV_ENDPOINT, getaddrinfo of it on every node",
)  # fmt: skip
def check_master_resolve(fleet: Fleet) -> Answer:
    """Report nodes where the master's name does not resolve, or resolves to a different host than on the others."""
    readings = fleet.each(lambda node: node.names)
    found = tuple((node, names.master) for node, names in readings if names.master is not None)
    if not found:
        return skipped("no MASTER_ADDR and no rendezvous endpoint is given")
    if all(_is_no_name(lookup.name) for _, lookup in found):
        return passed(f"{found[0][1].name} is an address, not a name")
    problems = [_unresolved(node, lookup) for node, lookup in found if not lookup.addresses]
    if len({lookup.name for _, lookup in found}) == 1:
        problems += _elsewhere(fleet, found)
    seen = (f"{one.name} resolves to {', '.join(one.addresses) or one.error}" for _, one in found)
    return judged(problems, "; ".join(dict.fromkeys(seen)))


def _is_no_name(name: str) -> bool:
    """Say whether a name is an address or localhost, which other checks handle."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name.lower() in LOOPBACK_NAMES
    return True


def _unresolved(node: Node, lookup: Lookup) -> Problem:
    how = "did not resolve within 2 s: a name server does not respond" if lookup.timed_out else "does not resolve"
    return Problem(
        summary=f"the master's name {how}: torch silently retries until its timeout",
        evidence=(f"{lookup.name}: {lookup.error}",),
        fix=f"run `getent hosts {lookup.name}` on the node; add the name to DNS or /etc/hosts, or set MASTER_ADDR to "
        "an address",
        hosts=(node.host,),
    )


def _elsewhere(fleet: Fleet, found: Found) -> Iterator[Problem]:
    """Yield a problem if the nodes resolve the name to different addresses that are not all rank 0's host."""
    voices = [Voice(host=node.host, ranks=node.ranks, value=_meaning(fleet, node, one)) for node, one in found]
    split = compare(voice for voice in voices if voice.value)
    if split is None:
        return
    disjoint = not set.intersection(*(set(side.value) for side in split.sides))
    yield Problem(
        summary=describe(split, f"{found[0][1].name} resolves to", words=", ".join)
        + ("" if disjoint else ": connections may go to different hosts"),
        evidence=tuple(f"{node.host}: {', '.join(one.addresses)}" for node, one in found if node.host in split.hosts),
        fix=f"make {found[0][1].name} resolve to one host in DNS and /etc/hosts on all nodes, or set MASTER_ADDR to an "
        "address",
        severity=None if disjoint else Severity.WARNING,
        confidence=split.confidence,
        hosts=split.hosts,
    )


def _meaning(fleet: Fleet, node: Node, lookup: Lookup) -> tuple[str, ...] | None:
    """Return the sorted addresses that a node resolves. All addresses of rank 0's host become a single value."""
    head = fleet.nodes[0]
    own = {str(ip) for ip in own_ips(known(head.network)) if not (ip.is_loopback or ip.is_link_local)}
    if node is head and all(map(is_loopback_address, lookup.addresses)):
        return None
    meant = {"rank 0's host" if address in own else address for address in lookup.addresses}
    return tuple(sorted(meant)) or None


@rule(
    "DD209", "rdns-slow", Severity.WARNING, "Name lookups are slow",
    group=CheckGroup.NETWORK, needs=("names",),
    reads="getaddrinfo of the host name and the master, getnameinfo of own addresses",
)  # fmt: skip
def check_rdns_slow(node: Node) -> Answer:
    """Report look-ups that take longer than a second."""
    names = need(node.names)
    times = dict(_times(names))
    slow = {what: duration for what, duration in times.items() if duration > SLOW_S}
    seen = ", ".join(f"{what}: {_seconds(duration)}" for what, duration in times.items())
    if not slow:
        return passed(seen)
    problem = Problem(
        summary="name lookups take longer than a second, and every connection to torch's store needs one",
        evidence=tuple(f"{what}: {_seconds(duration)}" for what, duration in slow.items()),
        fix="set a working name server in /etc/resolv.conf (resolvectl status shows the current ones), or add all "
        "nodes to /etc/hosts",
    )
    return judged([problem], seen)


def _times(names: Names) -> Iterator[tuple[str, float]]:
    for what, lookup in (("host name", names.own), ("master's name", names.master)):
        if lookup is not None and not lookup.timed_out:
            yield what, lookup.duration_s
    if names.reverse_s is not None:
        yield "names of own addresses", names.reverse_s


def _seconds(duration: float) -> str:
    if duration < 0.1:
        return f"{duration * 1000:.0f} ms"
    return f"{duration:.1f} s" if duration < FOREVER_S else f"no response within {FOREVER_S:.0f} s"
