"""Reads what a process waits for: its system call, locks, ended children, commands that it runs.

We may read /proc/PID/syscall only for processes that we may trace: processes of the same user and, with Yama's
ptrace_scope 1, only those that we started. /proc/locks has "1: FLOCK  ADVISORY  WRITE 6620 fe:00:2148269 0 EOF"; a "->"
after the number means that the process waits for that lock. The file is found by device and inode.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.connections import Socket, find_listener, read_connections, read_rows
from ddpdoctor.collect.proc import Process, list_names, list_pids, read_command, read_environment, read_link, read_text
from ddpdoctor.collect.recorded import ended_child, lock_of
from ddpdoctor.collect.system import is_shared
from ddpdoctor.model.facts import Blocked, FileLock, LockFile, LockKind, Owner, ProcessCauses

if TYPE_CHECKING:
    from collections.abc import Mapping

PROC = Path("/proc")
# System calls that can sleep for long, by number, from Linux's asm/unistd_64.h and asm-generic/unistd.h.
CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 17: "pread64", 19: "readv", 23: "select", 35: "nanosleep", 42: "connect",
        43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl",
        73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait",
        247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
        288: "accept4", 332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 63: "read", 64: "write", 65: "readv",
        67: "pread64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync", 83: "fdatasync", 95: "waitid",
        98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4", 291: "statx",
    },
}  # fmt: skip
# Calls whose first argument is a file descriptor.
OF_A_FILE = frozenset({
    "read", "write", "pread64", "readv", "connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg",
    "fcntl", "flock", "fsync", "fdatasync",
})  # fmt: skip
POLLS = frozenset({"poll", "ppoll"})
POLL_FD = struct.Struct("<ihh")  # struct pollfd: the descriptor, the requested events, the returned events
WAITS_FOR_INPUT = frozenset({"read", "readv", "poll", "ppoll"})
SELECTS = frozenset({"select", "pselect6"})  # whose first argument 1 means only descriptor 0: readline waits for a key
_KINDS = re.compile(r"(?:anon_inode:\[?)?(pipe|socket|eventfd|eventpoll)\b")
LOCK_KINDS = {"FLOCK": "flock", "POSIX": "fcntl", "OFDLCK": "ofd"}
_LOCK_LINE = re.compile(
    r"^(?P<number>\d+): +(?P<waits>->\s+)?(?P<kind>\w+) +\w+ +\w+ +(?P<pid>-?\d+) "
    r"(?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+):(?P<inode>\d+) "
)
MOST_OTHERS = 8  # How many locks of other processes we keep for one that polls. Our choice: more would not help.
MOST_HOLDERS = 4
MOST_BYTES = 256  # how much of the file we read: it holds a pid, and perhaps a host name
# A pid alone on its line, and perhaps its host on the next line, in filelock's format.
_OWNER = re.compile(r"\s*(?:pid\W{0,3})?(?P<pid>\d{1,8})(?:\s*\n(?P<host>[A-Za-z][\w.-]*))?(?=\s|$)", re.IGNORECASE)
MOST_COMMANDS = 3
# The kernel's names for processes that run the job's Python code; their stacks say more than their commands.
PYTHON_NAMES = ("python", "pt_data_worker", "pt_main_thread", "resource_tracke")


def read_blocked(pid: int, proc: Path = PROC, machine: str | None = None) -> Blocked | None:
    """Return the call that the main thread sleeps in, or None if it runs or we may not read it."""
    words = read_text(proc / str(pid) / "syscall").split()
    if len(words) < 2 or not words[0].isdigit():
        return None
    call = CALLS.get(machine or os.uname().machine, {}).get(int(words[0]))
    if call is None:
        return None
    first = int(words[1], 16)
    fd: int | None = first & 0xFFFFFFFF
    if call in POLLS and len(words) > 2:  # the only descriptor that poll(2) was given
        try:
            with (proc / str(pid) / "mem").open("rb", buffering=0) as memory:
                memory.seek(first)
                fd = POLL_FD.unpack(memory.read(POLL_FD.size))[0] if int(words[2], 16) == 1 else None
        except (OSError, ValueError, OverflowError, struct.error):
            fd = None
    if fd is None or fd < 0 or call not in OF_A_FILE | POLLS:
        return Blocked(call=call, alone_on_fd0=call in SELECTS and first == 1)
    target = read_link(proc / str(pid) / "fd" / str(fd))
    kind, remote = _KINDS.match(target), None
    if target.startswith("socket:["):
        inode = int(target.removeprefix("socket:[").rstrip("]"))
        remote = next((row.remote for row in read_rows(pid, proc) if row.inode == inode), None)
    file, is_alone = kind[1] if kind else target or None, fd == 0 and call in WAITS_FOR_INPUT
    return Blocked(call=call, fd=fd, file=file, remote=remote, alone_on_fd0=is_alone)


def read_kernel_function(pid: int, proc: Path = PROC) -> str | None:
    """Return the kernel function that the main thread sleeps in, or None if it runs or the kernel hides it."""
    name = read_text(proc / str(pid) / "wchan").strip()
    return name if name not in {"", "0"} else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLine:
    """One line of /proc/locks."""

    number: int
    waits: bool
    kind: str
    pid: int
    file: tuple[int, int]  # device and inode

    def is_of(self, seen: os.stat_result) -> bool:
        """Return whether the lock is on a file; on overlay and btrfs, stat has another device, so the inode must do."""
        return seen.st_ino == self.file[1] and (seen.st_dev == self.file[0] or os.major(self.file[0]) == 0)


def read_locks(proc: Path = PROC) -> tuple[LockLine, ...]:
    """Return all locks that this process may see."""
    found = []
    for match in map(_LOCK_LINE.match, read_text(proc / "locks").splitlines()):
        if match is not None and match["kind"] in LOCK_KINDS:
            number, waits, kind = int(match["number"]), match["waits"] is not None, LOCK_KINDS[match["kind"]]
            file = os.makedev(int(match["major"], 16), int(match["minor"], 16)), int(match["inode"])
            found.append(LockLine(number=number, waits=waits, kind=kind, pid=int(match["pid"]), file=file))
    return tuple(found)


def awaited_lock(pid: int, lines: tuple[LockLine, ...]) -> FileLock | None:
    """Return the lock that a process waits for in the kernel, and its holder, or None if it waits for none."""
    mine = next((line for line in lines if line.waits and line.pid == pid), None)
    if mine is None:
        return None
    held = next((line for line in lines if line.number == mine.number and not line.waits), None)
    holder = held.pid if held is not None and held.pid > 0 else None
    command = "" if holder is None else read_command(holder)
    return FileLock(path=_path_of(mine, pid), kind=mine.kind, holder_pid=holder, holder=command)


def locks_of_others(pid: int, family: frozenset[int], lines: tuple[LockLine, ...]) -> tuple[FileLock, ...]:
    """Return the locks that other processes of ``family`` hold on files whose paths we can find, one for each file."""
    locks = {}
    for line in lines:
        if line.waits or line.pid == pid or line.pid not in family:
            continue
        path = _path_of(line, line.pid)
        if path is not None:
            holder = read_command(line.pid)
            locks[path, line.pid] = FileLock(path=path, kind=line.kind, holder_pid=line.pid, holder=holder)
    return tuple(locks.values())[:MOST_OTHERS]


def _path_of(line: LockLine, pid: int) -> str | None:
    folder = PROC / str(pid) / "fd"
    for path in map(folder.joinpath, list_names(folder)):
        try:
            if line.is_of(path.stat()):
                return str(path.readlink())
        except OSError:
            continue
    return None


def read_lock_files(answers: Mapping[int, dict[str, Any]], lines: tuple[LockLine, ...]) -> dict[int, LockFile]:
    """Return, by pid, the lock files that ranks said they poll for; each file is read only once."""
    polled = {pid: lock_of(answer) for pid, answer in answers.items()}
    waiting = frozenset(pid for pid, (path, _) in polled.items() if path is not None)
    found: dict[str, LockFile] = {}
    for path, kind in polled.values():
        if path is not None and path not in found:
            found[path] = read_lock_file(path, kind, lines, waiting)
    return {pid: found[path] for pid, (path, _) in polled.items() if path is not None}


def read_lock_file(path: str, kind: LockKind, lines: tuple[LockLine, ...], waiting: frozenset[int]) -> LockFile:
    """Return what we can see of a lock file; ``waiting`` are processes that poll for it but do not own it."""
    try:
        seen = os.stat(path)  # noqa: PTH116 - facts have their paths as strings
    except OSError:
        return LockFile(path=path, kind=kind, exists=False)
    holders, unseen = _holders(seen, {line.pid for line in lines if line.is_of(seen)}, waiting)
    # The pid that the file names, as many lock files do, and the host if it names one
    match = None
    with contextlib.suppress(OSError):
        if stat.S_ISREG(seen.st_mode):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd, "rb", buffering=0) as file:
                match = _OWNER.match(file.read(MOST_BYTES).decode(errors="replace"))
    pid, host = (int(match["pid"]), match["host"]) if match else (None, None)
    elsewhere = host is not None and host != os.uname().nodename
    shared = is_shared(Path(path))
    known = pid is not None and not elsewhere and not (shared and host is None)
    return LockFile(
        path=path, kind=kind, exists=True, age_s=max(0.0, time.time() - seen.st_mtime),
        holders=tuple(Owner(pid=pid, command=read_command(pid)) for pid in holders[:MOST_HOLDERS]), unseen=unseen,
        named_pid=pid, named_lives=(PROC / str(pid)).exists() if known else None,
        named_host=host if elsewhere else None, shared=shared,
    )  # fmt: skip


def _holders(seen: os.stat_result, locking: set[int], waiting: frozenset[int]) -> tuple[list[int], int]:
    """Return who has the file open or locked, and how many processes of the file's owner we could not inspect."""
    holders, unseen = [], 0
    for pid in list_pids(PROC):
        if pid in waiting:
            continue
        folder, opened = PROC / str(pid) / "fd", set()
        is_hidden = False
        try:
            for number in os.listdir(folder):  # noqa: PTH208 - only names are needed
                with contextlib.suppress(OSError):
                    file = (folder / number).stat()
                    opened.add((file.st_dev, file.st_ino))
        except OSError as error:
            is_hidden = isinstance(error, PermissionError)
        if (seen.st_dev, seen.st_ino) in opened or pid in locking:
            holders.append(pid)
        elif is_hidden:
            with contextlib.suppress(OSError):
                unseen += (PROC / str(pid)).stat().st_uid == seen.st_uid
    return holders, unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What we read only once for all ranks."""

    family: frozenset[int] = frozenset()  # the processes of the job
    locks: tuple[LockLine, ...] = field(default_factory=read_locks)
    connections: tuple[Socket, ...] = ()  # those of the network that all ranks share; else each rank's own is read
    lock_files: dict[int, LockFile] = field(default_factory=dict)  # those that ranks poll for, by pid


def read_causes(pid: int, below: tuple[Process, ...], host: HostFacts) -> ProcessCauses:
    """Return what we can see of one living process; ``below`` are its descendants."""
    awaited = awaited_lock(pid, host.locks)
    blocked = read_blocked(pid)
    remote = blocked.remote if blocked is not None else None
    rows = host.connections or read_rows(pid)
    listener = find_listener(remote, rows) if remote else None
    # We keep no other variable than the port of the store.
    pairs = (pair.partition(b"=") for pair in read_environment(pid)) if remote else ()
    store_port = next((value for name, _, value in pairs if name == b"MASTER_PORT"), b"")
    commands = [child for child in below if child.ppid == pid and child.state not in "ZX"]
    commands = [child for child in commands if not child.name.startswith(PYTHON_NAMES)][:MOST_COMMANDS]
    lost = []
    for child in (child for child in below if child.state == "Z"):
        code = None if child.exit_status is None else os.waitstatus_to_exitcode(child.exit_status)
        lost.append(ended_child(child.pid, code, name=child.name))
    return ProcessCauses(
        blocked=blocked,
        store_port=int(store_port) if store_port.isdigit() else None,
        kernel_function=read_kernel_function(pid),
        waits_for_lock=awaited,
        locks_of_others=() if awaited is not None else locks_of_others(pid, host.family, host.locks),
        lost_children=tuple(lost),
        connections=read_connections(pid, rows),
        lock_file=host.lock_files.get(pid),
        listener=None if listener is None else Owner(pid=listener, command=read_command(listener)),
        commands=tuple((child.pid, read_command(child.pid)) for child in commands),
    )
