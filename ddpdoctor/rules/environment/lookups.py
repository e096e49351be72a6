"""DD204, DD207 and DD209: whether all nodes find rank 0's host, and how fast names resolve."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.rendezvous import LOOPBACK_NAMES, is_loopback_address, text_of
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.launch import has_several_nodes
from ddpdoctor.rules.interface_choice import own_ips
from ddpdoctor.rules.majority import Voice, compare, describe
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.network import Lookup, Names
    from ddpdoctor.model.node import Fleet, Node

    Found = tuple[tuple[Node, Lookup], ...]

SLOW_S = 1.0
"""Our choice: a healthy name server answers in milliseconds, and torch's store looks up a name for every connection."""
FOREVER_S = 2.0
"""Look-ups are cut off after this time (collect/network/names.py)."""


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
    return Problem(
        summary=f"the full name of rank 0's host {_what_it_is(lookup)} on other nodes: "
        + ("torchrun publishes it as MASTER_ADDR" if used else "torchrun's c10d rendezvous would publish it"),
        evidence=(f"the name is {lookup.name}", *_how(lookup)),
        fix="torchrun --local-addr ADDRESS_OF_THE_FIRST_HOST on the first host, or make the name resolve in DNS or "
        "/etc/hosts of all nodes",
        severity=None if used else Severity.WARNING,
        hosts=(node.host,),
    )


def _what_it_is(lookup: Lookup) -> str:
    if lookup.timed_out:
        return "does not resolve within 2 s"
    return "resolves to the node itself" if lookup.addresses else "does not resolve"


def _how(lookup: Lookup) -> tuple[str, ...]:
    return (lookup.error,) if lookup.error else (f"it resolves to {', '.join(lookup.addresses)}",)


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
