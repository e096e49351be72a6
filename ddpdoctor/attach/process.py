"""What can be read of a rank from outside at one moment: /proc, sockets, and stacks by py-spy, which never stops it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect import connections, proc
from ddpdoctor.collect.blocked import read_blocked, read_kernel_function
from ddpdoctor.collect.bounded import start_program, wait_for_program
from ddpdoctor.model.attached import ChildFacts, Peer, ProcessFacts, Refusal, ThreadFacts
from ddpdoctor.model.errors import install_command
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.connections import Socket
    from ddpdoctor.collect.proc import Process
    from ddpdoctor.model.attached import SeenRank

PROC = Path("/proc")
MOST_THREADS, MOST_PEERS, MOST_CHILDREN = 1024, 256, 64
CLOSE_WAIT = "08"  # the other end has closed the connection (include/net/tcp_states.h)
_STATES = {connections.ESTABLISHED: "established", connections.ASKING: "syn-sent", CLOSE_WAIT: "close-wait"}
PY_SPY = "py-spy"
PY_SPY_LIMIT_S = 5.0  # our choice: a rank takes 0.12 s, and more where many are read at once on few cores
TRIES = 3  # our choice: memory that changes while it is read can make no sense; the next reading mostly does
SUDO = 'sudo -E env "PATH=$PATH" ddpdoctor attach'  # sudo sets its own PATH, which lacks the virtual environment
DEBUG_POD = "kubectl debug POD -it --profile=sysadmin --target=CONTAINER --image=IMAGE"
_REFUSED = ("permission denied", "operation not permitted", "eperm")
_ITS_REMEDY = ": Try running again with"  # py-spy says sudo here, which helps only some of those who read it
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """What is read once for all ranks in a look: a table of connections can be long."""

    rows: Mapping[str, tuple[Socket, ...]]  # the TCP sockets of each network namespace, by its link in /proc
    # The bytes that came over connections of this network namespace, by the inode of the socket.
    received: Mapping[int, int]
    children: dict[int, list[Process]]  # from ``by_parent``

    def sockets_of(self, pid: int) -> list[Socket] | None:
        """Return the TCP sockets of a process, with those that listen, or None if we may not read them."""
        inodes = connections.read_sockets(pid)
        return None if inodes is None else [row for row in self.rows.get(_namespace(pid), ()) if row.inode in inodes]

    def listens(self, pid: int, port: int) -> bool:
        """Return whether a process listens on a TCP port, as far as we may read that."""
        return any(row.state == connections.LISTENING and row.port == port for row in self.sockets_of(pid) or ())


def read_host(pids: Iterable[int]) -> HostView:
    networks = {_namespace(pid): pid for pid in pids}
    return HostView(
        rows={network: connections.read_rows(pid) for network, pid in networks.items() if network},
        received={row.inode: row.size_bytes for row in connections.read_received()},
        children=proc.by_parent(proc.read_processes()),
    )


def read_facts(rank: SeenRank, host: HostView) -> ProcessFacts | None:
    pid = rank.pid
    process = proc.read_process(pid)
    if process is None or process.start_ticks != rank.start_ticks:
        return None
    tasks = PROC / str(pid) / "task"
    main = proc.read_process(pid, tasks)
    switches = proc.read_status(pid, tasks).get("voluntary_ctxt_switches", "")
    threads = filter(None, (proc.read_process(tid, tasks) for tid in proc.list_pids(tasks)[:MOST_THREADS]))
    sockets = host.sockets_of(pid)
    shown = [row for row in sockets or () if row.state not in {connections.LISTENING, connections.TIME_WAIT}]
    peers = tuple(
        Peer(
            local=row.local, remote=row.remote, state=_STATES.get(row.state, row.state),
            unsent_bytes=row.unsent_bytes, retries=row.retries, received_bytes=host.received.get(row.inode),
        )
        for row in shown[:MOST_PEERS]
    )  # fmt: skip
    return ProcessFacts(
        state=process.state, cpu_ticks=process.cpu_ticks, main_cpu_ticks=main.cpu_ticks if main is not None else 0,
        main_switches=int(switches) if switches.isdecimal() else None,
        threads=tuple(
            ThreadFacts(tid=thread.pid, name=thread.name, state=thread.state, cpu_ticks=thread.cpu_ticks)
            for thread in threads
        ),
        blocked=read_blocked(pid), kernel_function=read_kernel_function(pid),
        peers=peers if sockets is not None else None,
        children=tuple(
            ChildFacts(pid=child.pid, state=child.state, name=child.name, cpu_ticks=child.cpu_ticks)
            for child in proc.below(pid, host.children)[:MOST_CHILDREN]
        ),
    )  # fmt: skip


def shares_network(pid: int) -> bool:
    """Return whether a process uses the same network as this one."""
    return _namespace(pid) == _namespace("self") != ""


def inside_network(pid: int) -> str:
    """Return how to run the command in the network of a process."""
    command = f'sudo -E env "PATH=$PATH" nsenter -t {pid} -n ddpdoctor attach --pid {pid}'
    return f"Run ddpdoctor attach inside the container, or {command}"


def _namespace(pid: int | str) -> str:
    return proc.read_link(PROC / str(pid) / "ns/net")


def read_stacks(pid: int) -> tuple[Any, Refusal | None]:
    """Return py-spy's JSON, a list of threads, or None, and why not."""
    program = find_py_spy()
    if program is None:
        return None, Refusal(source=PY_SPY, reason="py-spy is not installed", remedy=install_command("attach"))
    error, threads = "", None
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    for _ in range(TRIES):
        end = wait_for_program(start_program(command, dict(os.environ)), PY_SPY_LIMIT_S)
        if end.status is None:
            return None, Refusal(source=PY_SPY, reason=f"py-spy did not end within {PY_SPY_LIMIT_S:.0f} s")
        if end.status == 0:
            try:
                threads = json.loads(end.out)
            except ValueError:
                threads = None
        if main_frames(threads) is not None:
            return threads, None
        error = " ".join(end.err.split()) or f"py-spy ended with status {end.status}"
        if any(word in error.lower() for word in _REFUSED):
            reason = hide_in_text(error.partition(_ITS_REMEDY)[0])[:300]
            remedy = remedy_for_tracing(os.geteuid(), proc.read_text(YAMA).strip())
            return None, Refusal(source=PY_SPY, reason=reason, remedy=remedy)
    # A process that ends may have no Python line any more.
    return threads, None if threads is not None else Refusal(source=PY_SPY, reason=hide_in_text(error)[:300])


def main_frames(threads: Any) -> tuple[tuple[str, str, int], ...] | None:
    """Return the main thread's frames as (file, function, line), innermost first, or None if it has none."""
    for thread in threads if isinstance(threads, list) else ():
        if thread.get("thread_name") == "MainThread" or thread.get("os_thread_id") == thread.get("pid"):
            frames = thread.get("frames") or ()
            return tuple((str(f.get("filename")), str(f.get("name")), int(f.get("line") or 0)) for f in frames) or None
    return None


def find_py_spy() -> str | None:
    """Return the py-spy beside our Python, else that on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def remedy_for_tracing(uid: int, scope: str) -> str:
    """Return what gives a user the right to read another process's memory; ``scope`` is yama's, empty without yama."""
    if scope == "3":
        return "Yama's ptrace_scope is 3: no user may read other processes until a reboot with another value"
    if uid == 0:
        return (
            "This root lacks CAP_SYS_PTRACE. Docker: --cap-add SYS_PTRACE; Kubernetes: "
            f"securityContext.capabilities.add: [SYS_PTRACE], or {DEBUG_POD}"
        )
    if scope in {"1", "2"}:
        return (
            f"yama's ptrace_scope is {scope}: {SUDO}; or, until the next boot, sudo sysctl kernel.yama.ptrace_scope=0; "
            "or give this program CAP_SYS_PTRACE"
        )
    return f"{SUDO}; in a container: docker run --cap-add SYS_PTRACE, or {DEBUG_POD}"
