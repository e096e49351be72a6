"""Reads the machine's interfaces, the port for the store, and the refusing chains of the packet filter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.files import read_link
from ddpdoctor.collect.network.firewall import read_firewall
from ddpdoctor.collect.network.ports import read_master_port
from ddpdoctor.collect.network.routes import read_addresses, read_default_interface
from ddpdoctor.collect.process.connections import LISTENING, read_own_rows
from ddpdoctor.model.network import Interface, Network

if TYPE_CHECKING:
    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System


FOLDER = "/sys/class/net"
IFF_UP = 0x1
IFF_LOOPBACK = 0x8
LAST = 1 << 30
"""Sorts interfaces without an index after all others."""


def read_network(system: System, _plan: ReadingPlan) -> Network:
    """Read interfaces, routes, ports and the packet filter; on a Mac, only interfaces and the port."""
    addresses = read_addresses(system)
    return Network(
        interfaces=_interfaces(system, addresses),
        default_interface=read_default_interface(system),
        ipv6_disabled=_flag(system.number_or_none("/proc/sys/net/ipv6/conf/all/disable_ipv6")),
        local_ports=_local_ports(system),
        master_port=read_master_port(system, addresses),
        firewall=read_firewall(system),
        mesh_proxy=has_mesh_proxy(system),
    )


def _flag(number: int | None) -> bool | None:
    return None if number is None else number == 1


def _local_ports(system: System) -> tuple[int, int] | None:
    words = system.text_or("/proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def _interfaces(system: System, addresses: dict[str, tuple[str, ...]]) -> tuple[Interface, ...]:
    """Return sysfs's interfaces in the kernel's order, then aliases such as eth0:1; without sysfs, those of psutil."""
    names = system.names(FOLDER)
    names = tuple(name for name in names if system.exists(f"{FOLDER}/{name}/flags"))  # bonding_masters is a file
    if not names:
        return _interfaces_without_sysfs(system, addresses)
    aliases = [name for name in addresses if name not in names and name.partition(":")[0] in names]
    by_index = sorted(names, key=lambda name: (_number(system, name, "ifindex", LAST), name))
    return tuple(_interface(system, name, addresses.get(name, ())) for name in [*by_index, *sorted(aliases)])


def _interface(system: System, name: str, addresses: tuple[str, ...]) -> Interface:
    device = name.partition(":")[0]
    flags = _number(system, device, "flags", 0)
    carrier = system.number_or_none(f"{FOLDER}/{device}/carrier")  # unreadable if the interface is down
    speed = _number(system, device, "speed", -1)
    return Interface(
        name=name,
        up=bool(flags & IFF_UP),
        operstate=system.text_or(f"{FOLDER}/{device}/operstate", "unknown"),
        carrier=_flag(carrier),
        loopback=bool(flags & IFF_LOOPBACK),
        virtual=_is_virtual(system, device),
        mtu=_number(system, device, "mtu", 0),
        speed_mb_s=speed if speed > 0 else None,
        addresses=addresses,
        link_type=_number(system, device, "type", 0),
    )


def _number(system: System, name: str, file: str, default: int) -> int:
    found = system.number_or_none(f"{FOLDER}/{name}/{file}")
    return default if found is None else found


def _is_virtual(system: System, name: str) -> bool:
    target = read_link(system.path(f"{FOLDER}/{name}"))
    return "/virtual/" in target if target else not system.exists(f"{FOLDER}/{name}/device")


def _interfaces_without_sysfs(system: System, addresses: dict[str, tuple[str, ...]]) -> tuple[Interface, ...]:
    """Return the interfaces from psutil, on a Mac or in a sandbox without /sys."""
    try:
        states = system.calls.interface_states()
    except OSError:
        return ()
    return tuple(
        Interface(
            name=name,
            up=state.up,
            operstate="up" if state.up else "down",
            carrier=None,
            loopback=name.startswith("lo"),
            virtual=False,
            mtu=state.mtu,
            speed_mb_s=state.speed_mb_s or None,
            addresses=addresses.get(name, ()),
            link_type=0,
        )
        for name, state in states.items()
    )


ENVOY_PORTS = frozenset({15001, 15006})
"""Ports of Istio's proxy for outgoing and incoming connections
(https://istio.io/latest/docs/ops/deployment/application-requirements/). A pod's containers share their network, so the
other containers see the proxy's sockets but not its processes."""


def has_mesh_proxy(system: System) -> bool:
    """Return whether something listens on both ports of Istio's proxy, or False if we cannot see sockets."""
    return {row.port for row in read_own_rows(system) if row.state == LISTENING} >= ENVOY_PORTS
