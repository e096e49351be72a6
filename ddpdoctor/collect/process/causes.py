"""Reads what may explain why a rank is stuck: its system call, locks, ended children, commands that it runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.collect.process.blocked import read_blocked, read_kernel_function
from ddpdoctor.collect.process.connections import Socket, find_listener, read_connections, read_rows
from ddpdoctor.collect.process.file_locks import LockLine, awaited_lock, locks_of_others, read_lines
from ddpdoctor.collect.process.proc import read_command, read_environment
from ddpdoctor.model.causes import Blocked, LockFile, LostChild, Owner, ProcessCauses
from ddpdoctor.model.facts import signal_name

if TYPE_CHECKING:
    from ddpdoctor.collect.process.proc import Process

MOST_COMMANDS = 3
PYTHON_NAMES = ("python", "pt_data_worker", "pt_main_thread", "resource_tracke")
"""The kernel's names for processes that run the job's Python code; their stacks say more than their commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What we read only once for all ranks."""

    family: frozenset[int] = frozenset()
    """The processes of the job."""
    locks: tuple[LockLine, ...] = field(default_factory=read_lines)
    connections: tuple[Socket, ...] = ()
    """The connections of the network that all ranks share; if empty, each rank's own network is read."""
    lock_files: dict[int, LockFile] = field(default_factory=dict)
    """The lock files that ranks poll for, by the rank's pid."""


def read_causes(pid: int, below: tuple[Process, ...], host: HostFacts) -> ProcessCauses:
    """Return what we can see of one living process; ``below`` are its descendants."""
    awaited = awaited_lock(pid, host.locks)
    blocked = read_blocked(pid)
    rows = host.connections or read_rows(pid)
    return ProcessCauses(
        blocked=blocked,
        store_port=_store_port(pid) if blocked is not None and blocked.remote else None,
        kernel_function=read_kernel_function(pid),
        waits_for_lock=awaited,
        locks_of_others=() if awaited is not None else locks_of_others(pid, host.family, host.locks),
        lost_children=tuple(lost_child(child) for child in below if child.state == "Z"),
        connections=read_connections(pid, rows),
        lock_file=host.lock_files.get(pid),
        listener=_listener(blocked, rows),
        commands=tuple((child.pid, read_command(child.pid)) for child in _commands(pid, below)),
    )


def _listener(blocked: Blocked | None, rows: tuple[Socket, ...]) -> Owner | None:
    """Return the process on this host that serves the connection that another process sleeps in, or None."""
    pid = find_listener(blocked.remote, rows) if blocked is not None and blocked.remote else None
    return None if pid is None else Owner(pid=pid, command=read_command(pid))


def lost_child(child: Process) -> LostChild:
    """Return how a zombie child ended."""
    status = child.exit_status
    return ended_child(child.pid, None if status is None else os.waitstatus_to_exitcode(status), name=child.name)


def ended_child(pid: int, code: int | None, *, name: str = "", reaped: bool = False) -> LostChild:
    """Return a child that has ended; ``code`` is its exit status, or a signal's number below zero."""
    how = signal_name(-code) if code is not None and code < 0 else None
    return LostChild(pid=pid, name=name, exit_code=None if how else code, signal=how, reaped=reaped)


def _store_port(pid: int) -> int | None:
    """Return MASTER_PORT from a process's initial environment; we keep no other variable."""
    pairs = (pair.partition(b"=") for pair in read_environment(pid))
    port = next((value for name, _, value in pairs if name == b"MASTER_PORT"), b"")
    return int(port) if port.isdigit() else None


def _commands(pid: int, below: tuple[Process, ...]) -> list[Process]:
    own = [child for child in below if child.ppid == pid and child.state not in "ZX"]
    return [child for child in own if not child.name.startswith(PYTHON_NAMES)][:MOST_COMMANDS]
