"""Whether a name leads to this host: then this member is the first of those that only the rendezvous will number."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpdoctor.launch.placement import Placement

LOOKUP_LIMIT_S = 2.0
"""Ours: the job waits for it, and a name that takes longer will keep it waiting longer anyway."""


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


def _can_be_bound(family: socket.AddressFamily, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
