"""Whether a name leads to this host: then this member is the first of those that only the rendezvous will number.

And by which addresses others may reach it.
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
"""Ours: the job waits for it, and a name that takes longer will keep it waiting longer anyway."""

MOST_ADDRESSES = 8
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Which interfaces the job uses, by name, or of NCCL's by how names begin."""


def number_first(placement: Placement) -> Placement:
    """Give a member without a number the first one, where the store is to be on its host.

    Of members on one host none is told from another by that; they stay without.
    """
    if placement.number is not None or placement.one_host or placement.store is None:
        return placement
    return replace(placement, number=0) if is_own_host(*placement.store) else placement


def is_own_host(host: str, port: int) -> bool:
    """Return whether an address of a name can be bound to here; False too where the name does not resolve."""
    from ddpdoctor.exchange.reach import look_up  # not at a start on one node: it is not cheap

    try:
        addresses = look_up(host, port, LOOKUP_LIMIT_S)
    except OSError:
        return False
    return any(_can_be_bound(family, address) for family, address in addresses)


def own_addresses() -> tuple[str, ...]:
    """Return the addresses under which others may reach this host: those of the job's own interfaces first.

    Then those that its name resolves to, which Gloo publishes, and all others but loopback and link-local ones.
    """
    from ddpdoctor.collect.network.sockets import list_addresses
    from ddpdoctor.exchange.reach import look_up

    wanted = tuple(
        name.lstrip("=") for variable in INTERFACE_VARIABLES for name in os.environ.get(variable, "").split(",") if name
    )
    by_name = list_addresses()
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
