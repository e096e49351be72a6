"""Reads what /proc and the kernel's socket diagnostics say of a rank at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.blocked import read_blocked, read_kernel_function
from ddpdoctor.collect.connections import (
    ASKING,
    ESTABLISHED,
    LISTENING,
    TIME_WAIT,
    read_received,
    read_rows,
    read_sockets,
)
from ddpdoctor.collect.proc import below, by_parent, read_process, read_processes, read_status
from ddpdoctor.collect.system import list_pids, read_link
from ddpdoctor.model.attached import ChildFacts, Peer, ProcessFacts, ThreadFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.connections import Socket
    from ddpdoctor.collect.proc import Process
    from ddpdoctor.model.attached import SeenRank

PROC = Path("/proc")
MOST_THREADS, MOST_PEERS, MOST_CHILDREN = 1024, 256, 64
CLOSE_WAIT = "08"
"""The other end has closed the connection (include/net/tcp_states.h)."""
_STATES = {ESTABLISHED: "established", ASKING: "syn-sent", CLOSE_WAIT: "close-wait"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """What is read once for all ranks in a look: a table of connections can be long."""

    rows: Mapping[str, tuple[Socket, ...]]
    """The TCP sockets of each network namespace, by its link in /proc."""
    received: Mapping[int, int]
    """The bytes that came over connections of this network namespace, by the inode of the socket."""
    children: dict[int, list[Process]]
    """From ``by_parent``."""

    def sockets_of(self, pid: int) -> list[Socket] | None:
        """Return the TCP sockets of a process, with those that listen, or None if we may not read them."""
        inodes = read_sockets(pid)
        return None if inodes is None else [row for row in self.rows.get(_network(pid), ()) if row.inode in inodes]

    def listens(self, pid: int, port: int) -> bool:
        """Return whether a process listens on a TCP port, as far as we may read that."""
        return any(row.state == LISTENING and row.port == port for row in self.sockets_of(pid) or ())


def read_host(pids: Iterable[int]) -> HostView:
    """Read what concerns all of these processes."""
    networks = {_network(pid): pid for pid in pids}
    return HostView(
        rows={network: read_rows(pid) for network, pid in networks.items() if network},
        received={row.inode: row.size_bytes for row in read_received()},
        children=by_parent(read_processes()),
    )


def read_facts(rank: SeenRank, host: HostView) -> ProcessFacts | None:
    """Return the facts of a rank, or None if it has ended."""
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
        peers=_peers(host.sockets_of(pid), host.received),
        children=_children(pid, host.children),
    )


def shares_network(pid: int) -> bool:
    """Return whether a process uses the same network as this one, so that its addresses are ours."""
    return _network(pid) == _network("self") != ""


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


def _network(pid: int | str) -> str:
    return read_link(PROC / str(pid) / "ns/net")


def _peers(sockets: list[Socket] | None, received: Mapping[int, int]) -> tuple[Peer, ...] | None:
    if sockets is None:
        return None
    rows = [row for row in sockets if row.state not in {LISTENING, TIME_WAIT}]
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
