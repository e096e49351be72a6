"""Commands that let the other nodes of a job through a host's firewall."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.model.reading import known

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.node import FirewallChain, Network, Node

EPHEMERAL = (32768, 60999)
"""The kernel's default ip_local_port_range (Documentation/networking/ip-sysctl.rst): NCCL and Gloo listen on ports that
the kernel picks."""
UNKNOWN_NETWORK = "NETWORK_OF_THE_NODES"
NAMED_SOURCES = 8
"""Our choice: nobody checks a longer list of addresses before running the command."""


def open_chain(chain: FirewallChain, network: str = UNKNOWN_NETWORK) -> str:
    """Return a command that lets a network through a chain that refuses it."""
    if chain.manager == "firewalld":
        return f"firewall-cmd --zone=trusted --add-source={network}"
    if chain.manager == "ufw":
        return f"ufw allow from {network}"
    tool, _, place = chain.name.partition(" ")
    if tool == "nft":
        return f"nft insert rule {place} {'ip6' if _is_v6(network) else 'ip'} saddr {network} accept"
    return f"{_iptables(network)} -I INPUT -s {network} -j ACCEPT"


def _iptables(network: str) -> str:
    """Return the command for such addresses; the other one does not accept them."""
    return "ip6tables" if _is_v6(network) else "iptables"


def _is_v6(network: str) -> bool:
    return ":" in network


def _sees(chain: FirewallChain, network: str) -> bool:
    """Say whether packets of a network pass through a chain: IPv4 and IPv6 have separate chains."""
    others = ("iptables ", "nft ip ") if _is_v6(network) else ("nft ip6 ",)
    return not chain.name.startswith(others)


def open_ports(node: Node | None, ports: tuple[int, int] | None, sources: Iterable[str]) -> str:
    """Return a command that lets hosts reach a range of ports on a node.

    ``node`` is None if its machine is not known. ``ports`` is None for the ports that its kernel hands out. If the
    chain that refuses is known, the command is for that chain, otherwise it is for iptables, as root.
    """
    machine = known(node.network) if node is not None else None
    network = network_of(machine, tuple(sources))
    refusing = known(machine.firewall) if machine is not None else None
    chain = next((chain for chain in refusing or () if _sees(chain, network)), None)
    if chain is not None:
        return open_chain(chain, network)
    low, high = ports or (machine.local_ports if machine is not None else None) or EPHEMERAL
    span = str(low) if low == high else f"{low}:{high}"
    return f"{_iptables(network)} -I INPUT -p tcp -s {network} --dport {span} -j ACCEPT"


def network_of(machine: Network | None, sources: tuple[str, ...]) -> str:
    """Return the machine's network that contains all these addresses, else the addresses with commas."""
    wanted = [ipaddress.ip_address(source.partition("%")[0]) for source in sources if source]
    for interface in machine.interfaces if machine is not None else ():
        for address in interface.addresses:
            network = ipaddress.ip_interface(address).network
            if wanted and all(one in network for one in wanted):
                return str(network)
    few = wanted and len(wanted) <= NAMED_SOURCES
    return ",".join(dict.fromkeys(map(str, wanted))) if few else UNKNOWN_NETWORK
