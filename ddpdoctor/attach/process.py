"""Reads what /proc and the kernel's socket diagnostics say of a rank at one moment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.files import list_pids
from ddpdoctor.collect.process.blocked import read_blocked, read_kernel_function
from ddpdoctor.collect.process.connections import ASKING, ESTABLISHED, LISTENING, TIME_WAIT, read_rows, read_sockets
from ddpdoctor.collect.process.proc import below, read_process, read_status
from ddpdoctor.model.attached import ChildFacts, Peer, ProcessFacts, ThreadFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.process.connections import Row
    from ddpdoctor.collect.process.proc import Process
    from ddpdoctor.model.attached import SeenRank

PROC = Path("/proc")
MOST_THREADS, MOST_PEERS, MOST_CHILDREN = 1024, 256, 64
CLOSE_WAIT = "08"
"""The other end has closed the connection (include/net/tcp_states.h)."""
_STATES = {ESTABLISHED: "established", ASKING: "syn-sent", CLOSE_WAIT: "close-wait"}


def read_facts(rank: SeenRank, received: Mapping[int, int], children: dict[int, list[Process]]) -> ProcessFacts | None:
    """Return the facts of a rank, or None if it has ended.

    ``received`` has bytes by the inode of a socket, ``children`` the result of ``by_parent``.
    """
    pid = rank.pid
    process = read_process(pid)
    if process is None or process.start_ticks != rank.start_ticks:
        return None
    main = read_process(pid, PROC / str(pid) / "task")
    switches = read_status(pid, PROC / str(pid) / "task").get("voluntary_ctxt_switches", "")
    return ProcessFacts(
        state=process.state,
        cpu_ticks=process.cpu_ticks,
        main_cpu_ticks=main.cpu_ticks if main is not None else 0,
        main_switches=int(switches) if switches.isdecimal() else None,
        threads=_threads(pid),
        blocked=read_blocked(pid),
        kernel_function=read_kernel_function(pid),
        peers=_peers(pid, received),
        children=_children(pid, children),
    )


def own_rows(pid: int) -> list[Row]:
    """Return the TCP sockets of a process, with those that listen. [] if we may not read them."""
    inodes = read_sockets(pid) or frozenset()
    return [row for row in read_rows(pid) if row.inode in inodes] if inodes else []


def listening_ports(pid: int) -> frozenset[int]:
    """Return the TCP ports on which a process listens, as far as we may read that."""
    return frozenset(row.port for row in own_rows(pid) if row.state == LISTENING)


def shares_network(pid: int) -> bool:
    """Return whether a process uses the same network as this one, so that its addresses are ours."""
    try:
        return (PROC / str(pid) / "ns/net").readlink() == (PROC / "self/ns/net").readlink()
    except OSError:
        return False


def inside_network(pid: int) -> str:
    """Return how to run the command in the network of a process."""
    command = f'sudo -E env "PATH=$PATH" nsenter -t {pid} -n ddpdoctor attach --pid {pid}'
    return f"Run ddpdoctor attach inside the container, or {command}"


def _threads(pid: int) -> tuple[ThreadFacts, ...]:
    tasks = PROC / str(pid) / "task"
    found = (read_process(tid, tasks) for tid in list_pids(tasks)[:MOST_THREADS])
    return tuple(
        ThreadFacts(tid=one.pid, name=one.name, state=one.state, cpu_ticks=one.cpu_ticks)
        for one in found
        if one is not None
    )


def _peers(pid: int, received: Mapping[int, int]) -> tuple[Peer, ...] | None:
    if read_sockets(pid) is None:
        return None
    rows = [row for row in own_rows(pid) if row.state not in {LISTENING, TIME_WAIT}]
    return tuple(
        Peer(
            local=row.local,
            remote=row.remote,
            state=_STATES.get(row.state, row.state),
            unsent_bytes=row.unsent_bytes,
            retries=row.retries,
            received_bytes=received.get(row.inode),
        )
        for row in rows[:MOST_PEERS]
    )


def _children(pid: int, children: dict[int, list[Process]]) -> tuple[ChildFacts, ...]:
    return tuple(
        ChildFacts(pid=one.pid, state=one.state, name=one.name, cpu_ticks=one.cpu_ticks)
        for one in below(pid, children)[:MOST_CHILDREN]
    )
