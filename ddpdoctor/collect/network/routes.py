"""Reads the addresses of interfaces, and the default route from the kernel's routing tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.collect.system import System

RTF_UP = 0x1
RTF_REJECT = 0x200
"""A route that refuses packets. Without another route, the kernel keeps one for "::/0" on lo."""


def read_addresses(system: System) -> dict[str, tuple[str, ...]]:
    """Return the addresses of every interface, or {} if they cannot be read."""
    try:
        return system.calls.interface_addresses()
    except OSError:
        return {}


def read_default_interface(system: System) -> str | None:
    """Return the interface of the default route with the lowest metric (IPv4 before IPv6), or None without one."""
    routes = [*_routes_v4(system)] or [*_routes_v6(system)]
    return min(routes)[1] if routes else None


def _routes_v4(system: System) -> Iterator[tuple[int, str]]:
    """Yield the metric and interface of every default route in /proc/net/route."""
    for line in system.text_or("/proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and int(fields[1], 16) == 0 and int(fields[7], 16) == 0 and _usable(fields[3]):
            yield int(fields[6]), fields[0]


def _routes_v6(system: System) -> Iterator[tuple[int, str]]:
    """Yield the metric and interface of every default route in /proc/net/ipv6_route."""
    for line in system.text_or("/proc/net/ipv6_route").splitlines():
        fields = line.split()
        if len(fields) >= 10 and int(fields[0], 16) == 0 and int(fields[1], 16) == 0 and _usable(fields[8]):
            yield int(fields[5], 16), fields[9]


def _usable(flags: str) -> bool:
    return bool(int(flags, 16) & RTF_UP) and not int(flags, 16) & RTF_REJECT
