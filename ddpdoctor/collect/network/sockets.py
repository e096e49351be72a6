"""Implements the calls of ``Calls`` for interfaces and ports on this machine."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceState:
    """An interface's state from psutil."""

    up: bool
    mtu: int
    speed_mb_s: int
    """Megabits per second; 0 if unknown."""


def list_addresses() -> dict[str, tuple[str, ...]]:
    """Return the IPv4 and IPv6 addresses of every interface that has one: "10.0.0.4/24", "fe80::1/64"."""
    import psutil

    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in {socket.AF_INET, socket.AF_INET6}:
                found.setdefault(name, []).append(_with_prefix(entry.address, entry.netmask))
    return {name: tuple(addresses) for name, addresses in found.items()}


def _with_prefix(address: str, netmask: str | None) -> str:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if not netmask:
        return f"{ip}/{ip.max_prefixlen}"
    mask = int(ipaddress.ip_address(netmask.partition("%")[0]))
    return f"{ip}/{mask.bit_count()}"


def list_states() -> dict[str, InterfaceState]:
    """Return every interface: whether it is up, its MTU, its speed."""
    import psutil

    return {
        name: InterfaceState(up=bool(state.isup), mtu=state.mtu, speed_mb_s=state.speed)
        for name, state in psutil.net_if_stats().items()
    }


def try_bind(port: int, *, reuse: bool) -> None:
    """Bind a TCP port on all addresses like torch's store: on IPv6 and IPv4 at once, else on IPv4. Raises OSError."""
    try:
        _bind(socket.AF_INET6, port, reuse=reuse)
    except OSError as error:
        if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EADDRINUSE}:
            raise
        _bind(socket.AF_INET, port, reuse=reuse)


def _bind(family: socket.AddressFamily, port: int, *, reuse: bool) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as one:
        if reuse:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind(("", port))
