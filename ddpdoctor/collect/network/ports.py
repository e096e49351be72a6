"""Reads whether the store's port is free on this host, and which process occupies it."""

from __future__ import annotations

import errno
import ipaddress
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.files import list_pids
from ddpdoctor.collect.launch.this_process import text
from ddpdoctor.collect.network.names import master_name
from ddpdoctor.collect.process.connections import LISTENING, TIME_WAIT, read_own_rows, read_sockets
from ddpdoctor.model.network import PortUse
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.model.rendezvous import parse_endpoint
from ddpdoctor.recorder.storage.secrets import hide_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.system import System

LIMIT_S = 2.0
SEARCH_S = 5.0
"""Limit for the search through all processes' descriptors for the owner of a port. Our choice: a few thousand take
tenths of a second, and many times that on a machine with busy CPUs."""
SHOWN = 120
"""How many characters of a command line we keep."""
NODE_RANKS = ("RANK", "PET_NODE_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_NODEID")
"""The first of these that is set says whether rank 0 runs here."""


def read_master_port(system: System, addresses: Mapping[str, tuple[str, ...]]) -> PortUse | Unread:
    """Try to bind MASTER_PORT, if this host would serve the store and this job does not already serve it."""
    port = _port_text(system.env)
    if not port:
        return Unread(why=Why.ABSENT, reason="MASTER_PORT is not set")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        return Unread(why=Why.ABSENT, reason="MASTER_PORT is not a port number")
    if system.env.get("TORCHELASTIC_RUN_ID"):
        return Unread(why=Why.NEEDLESS, reason="the store of this job listens on it")
    if not _serves_store(system, addresses):
        return Unread(why=Why.NEEDLESS, reason="the store would be on another host")
    return _try_port(system, int(port))


def _port_text(env: Mapping[str, str]) -> str:
    """Return the store's port from torch's variable, or from those for torchrun's options."""
    port = text(env, "MASTER_PORT", "PET_MASTER_PORT")
    if port:
        return port
    endpoint = parse_endpoint(env.get("PET_RDZV_ENDPOINT", ""), "PET_RDZV_ENDPOINT")
    return "" if endpoint is None or endpoint.port is None else str(endpoint.port)


def _serves_store(system: System, addresses: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether rank 0 would run here, by this process's rank, or else by the master's address."""
    node_rank = text(system.env, *NODE_RANKS)
    if node_rank:
        return node_rank == "0"
    master = master_name(system.env)
    if not master or master == "localhost":
        return True
    reply = ask_side_by_side({"master": lambda: system.calls.resolve(master)}, LIMIT_S)["master"]
    own = {str(ipaddress.ip_interface(one).ip) for those in addresses.values() for one in those}
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in reply.value or ())


def _try_port(system: System, port: int) -> PortUse | Unread:
    error = _bind(system, port, reuse=False)
    if error is None:
        return PortUse(port=port, free=True)
    if error.errno != errno.EADDRINUSE:
        return PortUse(port=port, error=error.strerror or str(error))
    if _bind(system, port, reuse=True) is None:
        closed = any((row.port, row.state) == (port, TIME_WAIT) for row in read_own_rows(system))
        return PortUse(port=port, free=True, time_wait=closed)
    pid, owner = _find_owner(system, port)
    if system.live and pid == os.getpid():
        return Unread(why=Why.NEEDLESS, reason="this command listens on it, to gather what all nodes have seen")
    return PortUse(port=port, error=error.strerror or str(error), owner_pid=pid, owner=owner)


def _bind(system: System, port: int, *, reuse: bool) -> OSError | None:
    try:
        system.calls.bind(port, reuse=reuse)
    except OSError as error:
        return error
    return None


def _find_owner(system: System, port: int) -> tuple[int | None, str | None]:
    """Return the pid and command of the process that listens; if we cannot find it, return only its user."""
    sockets = {row.inode: row.uid for row in read_own_rows(system) if (row.port, row.state) == (port, LISTENING)}
    deadline = time.monotonic() + SEARCH_S
    for pid in list_pids(system.path("/proc")) if sockets else ():
        if time.monotonic() > deadline:
            break
        if not sockets.keys().isdisjoint(read_sockets(pid, system.path("/proc")) or ()):
            return pid, _command(system, pid)
    return None, f"a process of user {next(iter(sockets.values()))}" if sockets else None


def _command(system: System, pid: int) -> str | None:
    words = [word for word in system.text_or(f"/proc/{pid}/cmdline").split("\0") if word]
    if not words:
        return system.text_or(f"/proc/{pid}/comm") or None
    shown = " ".join(hide_secrets((Path(words[0]).name, *words[1:])))
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
