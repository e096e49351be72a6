"""DD216 and DD218: whether rank 0 can listen on MASTER_PORT, and whether a packet filter blocks the other nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reading import need
from ddpdoctor.rules.answers import Answer, Problem, judged, passed
from ddpdoctor.rules.environment.launch import has_several_nodes
from ddpdoctor.rules.firewall_opening import EPHEMERAL, open_chain
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.network import FirewallChain, Network, PortUse
    from ddpdoctor.model.node import Fleet, Node

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
            seen.append(_seen(network.firewall))
            problems += [_refuses(node, network, chain) for chain in network.firewall if not _lets_in(chain, network)]
    if not known_of:
        need(fleet.each(lambda node: node.network)[0][1].firewall)
    if not has_several_nodes(fleet):
        return passed(f"{'; '.join(dict.fromkeys(seen))}; this does not matter on one node")
    return judged(problems, "; ".join(dict.fromkeys(seen)))


def _seen(chains: tuple[FirewallChain, ...]) -> str:
    return ", ".join(f"{chain.name}: {chain.refusal}" for chain in chains) or "no chain refuses incoming connections"


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
