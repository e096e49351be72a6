"""Which interface NCCL and Gloo would use on a node, by the rules in their source code.

NCCL uses the first interface that runs and has an address: from NCCL_SOCKET_IFNAME, else by a fixed order that begins
with ib*. Gloo uses those from GLOO_SOCKET_IFNAME, else the one whose address the host name resolves to, else loopback.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.reading import known
from ddpdoctor.rules.nccl_list import parse_nccl_list
from ddpdoctor.rules.settings import find_setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.node import Interface, Lookup, Network, Node, NodeProcess

    Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

IGNORED_LENGTH = 1
"""NCCL and Gloo ignore a value of one character: `strlen(env) > 1` (nccl src/misc/socket.cc, torch
ProcessGroupGloo)."""
NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""What NCCL tries in turn if nothing is set (ncclFindInterfaces, src/misc/socket.cc, 2.30). Between the first two it
tries the subnet of NCCL_COMM_ID. It excludes none of cni*, flannel*, veth*, tailscale*, wg*."""
NCCL_FAMILIES = {"AF_INET": 4, "AF_INET6": 6}
"""Values of NCCL_SOCKET_FAMILY; any other is ignored."""
NCCL_MAX = 16
"""MAX_IFS: the most interfaces that NCCL uses."""
VIRTUAL_BRIDGES = (
    "docker", "podman", "nerdctl", "virbr", "vnet", "lxcbr", "lxdbr", "incusbr", "veth", "cni", "cbr0", "flannel",
    "cali", "vxlan.calico", "cilium_", "weave", "antrea", "kube-ipvs", "kube-bridge", "nodelocaldns", "dummy",
)  # fmt: skip
"""Beginnings of interface names that container engines, Kubernetes and libvirt use. These interfaces lead only to
containers on the same host, and often have the same address on every host."""
DOCKER_NETWORK = re.compile(r"br-[0-9a-f]{12}")
"""A bridge of `docker network create`; other br* may be bridges around a real card."""
TUNNELS = ("tailscale", "wg", "tun", "tap", "zt", "utun", "ppp")
"""Beginnings of the names of VPNs' interfaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """An interface that a library uses, and the address that it gives to the others."""

    interface: Interface
    address: str
    """With the prefix length."""

    @property
    def ip(self) -> Ip:
        """The address alone."""
        return ipaddress.ip_interface(self.address).ip

    def __str__(self) -> str:
        return f"{self.interface.name} ({self.ip})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What both libraries use on a node."""

    nccl: tuple[Pick, ...]
    """The first one serves the bootstrap; over TCP all of them carry data."""
    gloo: tuple[Pick, ...] | None
    """None if it cannot be known."""

    def __str__(self) -> str:
        gloo = (
            "it is unknown which interface Gloo would use"
            if self.gloo is None
            else f"Gloo would use {_words(self.gloo)}"
        )
        return f"{gloo}, NCCL {_words(self.nccl[:1])}"


def _words(picks: Sequence[Pick]) -> str:
    return " and ".join(map(str, picks)) or "no interface"


def choose(node: Node, network: Network) -> Choice:
    """Return what both libraries would use, by the variables of the node's first process."""
    names = known(node.names)
    return Choice(
        nccl=pick_nccl(node, node.first, network),
        gloo=pick_gloo(node.first, network, names.own if names is not None else None),
    )


def pick_nccl(node: Node, process: NodeProcess, network: Network) -> tuple[Pick, ...]:
    """Return the interfaces that NCCL uses, in its order."""
    family_setting = find_setting(node, process, "NCCL_SOCKET_FAMILY")
    family = NCCL_FAMILIES.get(family_setting.value) if family_setting is not None else None
    setting = find_setting(node, process, "NCCL_SOCKET_IFNAME")
    if setting is not None and not is_ignored(setting.value):
        return match_nccl(network, setting.value, family)
    by_id = find_setting(node, process, "NCCL_COMM_ID")
    first, *others = NCCL_ORDER
    found = match_nccl(network, first, family) or _same_subnet(network, by_id.value if by_id is not None else "")
    return found or next(filter(None, (match_nccl(network, one, family) for one in others)), ())


def match_nccl(network: Network, names: str, family: int | None) -> tuple[Pick, ...]:
    """Return the interfaces that a value allows and that run and have an address: all IPv4 first, each once."""
    wanted = parse_nccl_list(names)
    found: dict[str, Pick] = {}
    for pick in _addresses(network):
        takes = pick.interface.running and family in {None, pick.ip.version} and wanted.takes(pick.interface.name)
        if takes and not (pick.ip.version == 6 and pick.ip.is_loopback):
            found.setdefault(pick.interface.name, pick)
    return tuple(found.values())[:NCCL_MAX]


def _same_subnet(network: Network, comm_id: str) -> tuple[Pick, ...]:
    """Return the interface in the network of NCCL_COMM_ID, "10.0.0.4:29600" or "[fd00::2]:29600"."""
    host = comm_id[1:].partition("]")[0] if comm_id.startswith("[") else comm_id.partition(":")[0]
    try:
        remote = ipaddress.ip_address(host)
    except ValueError:
        return ()
    near = (pick for pick in _addresses(network) if remote in ipaddress.ip_interface(pick.address).network)
    return tuple(near)[:1]


def _addresses(network: Network) -> Iterator[Pick]:
    """Yield all addresses in the order of getifaddrs: all IPv4 by interface, then all IPv6."""
    for version in (4, 6):
        for interface in network.interfaces:
            for address in interface.addresses:
                if ipaddress.ip_interface(address).version == version:
                    yield Pick(interface=interface, address=address)


def pick_gloo(process: NodeProcess, network: Network, own: Lookup | None) -> tuple[Pick, ...] | None:
    """Return the interfaces that Gloo uses: () if a name in the variable has no address, None if unknown."""
    text = process.variables.get("GLOO_SOCKET_IFNAME", "")
    if is_ignored(text):
        return None if own is None else _pick_by_name(network, own)
    picks = [_first_address(network, name) for name in parse_gloo_names(text)]
    return tuple(pick for pick in picks if pick is not None) if all(picks) else ()


def is_ignored(text: str) -> bool:
    """Say whether NCCL and Gloo treat the variable as not set."""
    return len(text) <= IGNORED_LENGTH


def parse_gloo_names(text: str) -> tuple[str, ...]:
    """Return the names of a value: a plain list that keeps white space. A comma at its end makes no empty name."""
    return tuple(text.removesuffix(",").split(","))


def _first_address(network: Network, name: str) -> Pick | None:
    return next((pick for pick in _addresses(network) if pick.interface.name == name), None)


def _pick_by_name(network: Network, own: Lookup) -> tuple[Pick, ...]:
    """Return the interface of the host name's first address that this host can bind, else loopback."""
    for address in own.addresses:
        for pick in _addresses(network):
            same = ipaddress.ip_address(address.partition("%")[0]) == pick.ip
            if same or (pick.interface.loopback and _is_loopback_v4(address) and _is_loopback_v4(str(pick.ip))):
                return (Pick(interface=pick.interface, address=f"{address}/{pick.address.partition('/')[2]}"),)
    return tuple(pick for pick in _addresses(network) if pick.interface.loopback)[:1]


def _is_loopback_v4(address: str) -> bool:
    """Say whether an address is in 127.0.0.0/8; if lo is up, all of these can be bound."""
    return address.startswith("127.")


def own_ips(network: Network | None) -> set[Ip]:
    """Return all addresses of a machine, or none if its interfaces are not known."""
    return {pick.ip for pick in _addresses(network)} if network is not None else set()


def is_bridge(name: str) -> bool:
    """Say by its name whether an interface leads only to containers or virtual machines on the same host."""
    return name.startswith(VIRTUAL_BRIDGES) or DOCKER_NETWORK.fullmatch(name) is not None


def is_tunnel(name: str) -> bool:
    """Say by its name whether an interface belongs to a VPN."""
    return name.startswith(TUNNELS)


def best_interface(network: Network) -> str | None:
    """Return the name of the interface that most likely leads to the other nodes, or None if there is none.

    It is the one of the default route, else a real card, else the first that is neither loopback nor a bridge.
    """
    usable = [one for one in network.interfaces if one.running and one.addresses and not one.loopback]
    usable = [one for one in usable if not is_bridge(one.name)]
    by_default = [one.name for one in usable if one.name == network.default_interface]
    real = [one.name for one in usable if not one.virtual and not is_tunnel(one.name)]
    return next(iter([*by_default, *real, *(one.name for one in usable)]), None)


def export(variable: str, network: Network | None) -> str:
    """Return "export GLOO_SOCKET_IFNAME=eth0", with the best interface of this machine."""
    best = best_interface(network) if network is not None else None
    return f"export {variable}={best or 'INTERFACE'}"
