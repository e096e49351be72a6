"""Reads this host's names, and the addresses of other hosts' names. A dead name server costs two seconds in all."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.launch.this_process import text
from ddpdoctor.collect.network.routes import read_addresses, read_default_interface
from ddpdoctor.model.network import Lookup, Names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpdoctor.collect.bounded import Reply
    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

    Ask = Callable[[], tuple[str, ...]]

LIMIT_S = 2.0
REVERSED = 4
"""How many of this host's own addresses we look up at most."""
_REVERSE = "reverse of "


def read_names(system: System, plan: ReadingPlan) -> Names:
    """Look up all names in parallel, for two seconds at most."""
    hostname = system.calls.hostname()
    names = {"own": hostname, "master": master_name(system.env), "head": plan.head}
    asked: dict[str, Ask] = {use: _resolve(system, name) for use, name in names.items() if name}
    asked |= {f"{_REVERSE}{address}": _reverse(system, address) for address in _own_addresses(system)}
    asked["full name"] = lambda: (system.calls.fqdn(),)
    replies = ask_side_by_side(asked, LIMIT_S)
    found = {use: _lookup(name, replies[use]) for use, name in names.items() if name}
    return Names(
        hostname=hostname,
        fqdn=next(iter(replies["full name"].value or ()), None),
        own=found["own"],
        master=found.get("master"),
        head=found.get("head"),
        reverse_s=max((reply.duration_s for use, reply in replies.items() if use.startswith(_REVERSE)), default=None),
    )


def master_name(env: Mapping[str, str]) -> str | None:
    """Return the host where the ranks meet, from the environment."""
    return text(env, "MASTER_ADDR") or host_of(text(env, "PET_RDZV_ENDPOINT")) or text(env, "PET_MASTER_ADDR") or None


def host_of(endpoint: str) -> str:
    """Return the host of "host", "host:port", "[::1]:port" or "fd00::2"."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    return endpoint.partition(":")[0] if endpoint.count(":") == 1 else endpoint


def _resolve(system: System, name: str) -> Ask:
    return lambda: system.calls.resolve(name)


def _reverse(system: System, address: str) -> Ask:
    return lambda: (system.calls.reverse(address),)


def _lookup(name: str, reply: Reply[tuple[str, ...]]) -> Lookup:
    if reply.timed_out:
        error: str | None = f"no answer within {LIMIT_S:.0f} s"
    else:
        error = None if reply.error is None else reply.error.strerror or str(reply.error)
    return Lookup(
        name=name,
        addresses=reply.value or (),
        error=error,
        timed_out=reply.timed_out,
        duration_s=round(reply.duration_s, 3),
    )


def _own_addresses(system: System) -> list[str]:
    """Return the addresses by which other hosts know this one: those of the default route's interface."""
    by_interface = read_addresses(system)
    default = read_default_interface(system)
    chosen = by_interface.get(default, ()) if default else [one for all_ in by_interface.values() for one in all_]
    plain = [ipaddress.ip_interface(address).ip for address in chosen]
    return [str(ip) for ip in plain if not (ip.is_loopback or ip.is_link_local)][:REVERSED]
