"""Finds out whether a name means this host, and by which addresses others may reach it.

If the rendezvous numbers the members, the one on the store's host is the first.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpdoctor.launch.command.placement import Placement

LOOKUP_LIMIT_S = 2.0
"""Our choice: the job waits for this lookup, and a name that takes longer will delay the job itself anyway."""

MOST_ADDRESSES = 8
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables that select the job's network interfaces, by name or, for NCCL, by prefix."""


def number_first(placement: Placement) -> Placement:
    """Give a member without a number the number 0 if the store will be on its host.

    If all members are on one host, this cannot single one out, so they stay without a number.
    """
    if placement.number is not None or placement.one_host or placement.store is None:
        return placement
    return replace(placement, number=0) if is_own_host(*placement.store) else placement


def is_own_host(host: str, port: int) -> bool:
    """Return whether this host can bind to an address of the name; False if the name does not resolve."""
    from ddpdoctor.exchange.reach import look_up  # a slow import, which a job on one node does not need

    try:
        addresses = look_up(host, port, LOOKUP_LIMIT_S)
    except OSError:
        return False
    return any(_can_be_bound(family, address) for family, address in addresses)


def own_addresses() -> tuple[str, ...]:
    """Return the addresses at which others may reach this host, those of the job's own interfaces first.

    Next come the addresses of its host name, which Gloo publishes, and then all except loopback and link-local ones.
    """
    from ddpdoctor.collect.system import SystemCalls
    from ddpdoctor.exchange.reach import look_up

    wanted = tuple(
        name.lstrip("=") for variable in INTERFACE_VARIABLES for name in os.environ.get(variable, "").split(",") if name
    )
    by_name = SystemCalls().interface_addresses()
    chosen = [one for name, addresses in by_name.items() if name.startswith(wanted) for one in addresses if wanted]
    named: list[str] = []
    with contextlib.suppress(OSError):
        named = [str(address[0]) for _, address in look_up(socket.gethostname(), 0, LOOKUP_LIMIT_S)]
    every = [*chosen, *named, *(one for addresses in by_name.values() for one in addresses)]
    plain = dict.fromkeys(address.partition("/")[0] for address in every)
    return tuple(address for address in plain if _is_for_others(address))[:MOST_ADDRESSES]


def _is_for_others(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def _can_be_bound(family: socket.AddressFamily, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
