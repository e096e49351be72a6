"""Makes what nodes see of each other where all is well, and changes one thing of it."""

from dataclasses import replace

from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.launch import (
    Connecting,
    Contact,
    JobSettings,
    NodePair,
    Rendezvous,
    StartTrial,
    StoreView,
    Transfer,
    Visit,
)
from ddpdoctor.model.node import FirewallChain, Fleet, Launcher
from tests.rules.environment.build import interface, network, node

PORT = 29500
SMALL, LARGE = 4096, 4 << 20
ERRORS = {
    Contact.REFUSED: "Connection refused",
    Contact.UNREACHABLE: "No route to host",
    Contact.NO_ANSWER: "no answer within 2 s",
    Contact.RESET: "Connection reset by peer",
    Contact.NO_STORE: "it answers, and not as a store does",
    Contact.UNRESOLVED: "Name or service not known",
}


def address(number):
    return f"10.0.0.{10 + number}"


def attempt(contact=Contact.CONNECTED, number=0, port=PORT):
    return Connecting(
        host="node0", address=None if contact is Contact.UNRESOLVED else address(number), port=port, contact=contact,
        error=ERRORS.get(contact, ""), duration_s=0.0003,
    )  # fmt: skip


def view(number, contact=Contact.CONNECTED, not_served="", serves=None):
    serves = number == 0 if serves is None else serves
    return StoreView(
        host="node0", port=PORT, serves=serves, not_served=not_served, attempts=(attempt(contact),), way="own port"
    )


def visit(number, **more):
    given = {
        "number": number, "host": f"node{number}", "arrived": True, "settings": JobSettings(node_rank=number),
        "store_view": view(number), "published": address(number), "interface": "eth0",
    }  # fmt: skip
    return Visit(**(given | more))


def absent(number):
    return Visit(number=number, host="", arrived=False, settings=JobSettings())


def machine(number, *, refuses=False):
    chain = FirewallChain(name="nft inet filter input", refusal="policy drop", accepts=("tcp dport 29500 accept",))
    facts = network(interface("eth0", f"{address(number)}/24"), firewall=(chain,) if refuses else ())
    return node(f"node{number}", index=number, network=facts)


def transfer(
    size, *, contact=Contact.CONNECTED, duration_s=0.004, retransmitted=0, sent=None, needless=0, delivered=None
):
    return Transfer(
        size_bytes=size, contact=contact, duration_s=duration_s,
        retransmitted=retransmitted, sent=size // 1448 + 1 if sent is None else sent,
        needless=needless, delivered_bytes=delivered,
    )  # fmt: skip


def pair(source, target, contact=Contact.CONNECTED, **more):
    """Return a pair that connected and sent, or did not connect."""
    connected = contact is Contact.CONNECTED
    given = {
        "source": source, "target": target, "address": address(target), "port": 40000 + target, "interface": "eth0",
        "connecting": attempt(contact, target, 40000 + target),
        "small": transfer(SMALL) if connected else None, "large": transfer(LARGE) if connected else None,
    }  # fmt: skip
    return NodePair(**(given | more))


def healthy(count=4):
    """Return a rendezvous of so many nodes where all works."""
    return Rendezvous(
        nnodes=count,
        visits=tuple(visit(number) for number in range(count)),
        fleet=Fleet(nodes=tuple(machine(n) for n in range(count)), launcher=Launcher.NNODES, world_size=count),
        pairs=tuple(pair(s, t) for s in range(count) for t in range(count) if s != t),
        trials=tuple(StartTrial(node=number, ok=True) for number in range(count)),
    )


def with_pairs(rendezvous, keys, make):
    """Return it with the pairs of ``keys`` made anew: ``make(source, target)``."""
    return replace(
        rendezvous,
        pairs=tuple(
            make(one.source, one.target) if (one.source, one.target) in keys else one for one in rendezvous.pairs
        ),
    )


def with_visits(rendezvous, **changes):
    """Return it with other views: ``n1=view(1, Contact.REFUSED)``."""
    views = {int(name[1:]): one for name, one in changes.items()}
    return replace(
        rendezvous,
        visits=tuple(replace(one, store_view=views.get(one.number, one.store_view)) for one in rendezvous.visits),
    )


def with_firewall(rendezvous, number):
    nodes = tuple(
        machine(index, refuses=True) if index == number else one for index, one in enumerate(rendezvous.fleet.nodes)
    )
    return replace(rendezvous, fleet=replace(rendezvous.fleet, nodes=nodes))


def column(number, count=4):
    return {(source, number) for source in range(count) if source != number}


def row(number, count=4):
    return {(number, target) for target in range(count) if target != number}


def error(kind, *hosts):
    return Finding(
        code="DD000", kind=kind, severity=Severity.ERROR, confidence=Confidence.HIGH, summary=kind, hosts=hosts
    )
