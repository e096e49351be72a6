"""Reads which system call the main thread of a process sleeps in, and on which file or connection.

We may read /proc/PID/syscall only for processes that we may trace: those of our own user and, with Yama's
ptrace_scope 1, only those that we started. The watcher started the ranks.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from ddpdoctor.collect.files import read_link, read_text
from ddpdoctor.collect.process.connections import read_rows
from ddpdoctor.model.causes import Blocked

PROC = Path("/proc")
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
"""System calls that can sleep for long, by number, from Linux's asm/unistd_64.h and asm-generic/unistd.h."""
OF_A_FILE = frozenset({
    "read", "write", "pread64", "readv", "connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg",
    "fcntl", "flock", "fsync", "fdatasync",
})  # fmt: skip
"""Calls whose first argument is a file descriptor."""
POLLS = frozenset({"poll", "ppoll"})
POLL_FD = struct.Struct("<ihh")
"""struct pollfd, which is in the process's memory: the descriptor, the requested events, the returned events."""
WAITS_FOR_INPUT = frozenset({"read", "readv", "poll", "ppoll"})
SELECTS = frozenset({"select", "pselect6"})
"""Their first argument is the highest descriptor plus one. 1 means only descriptor 0: readline waits for a key."""
_KINDS = re.compile(r"(?:anon_inode:\[?)?(pipe|socket|eventfd|eventpoll)\b")


def read_blocked(pid: int, proc: Path = PROC, machine: str | None = None) -> Blocked | None:
    """Return the call that the main thread sleeps in, or None if it runs or we may not read it."""
    words = read_text(proc / str(pid) / "syscall").split()
    if len(words) < 2 or not words[0].isdigit():
        return None
    call = CALLS.get(machine or os.uname().machine, {}).get(int(words[0]))
    if call is None:
        return None
    first = int(words[1], 16)
    fd = _polled_fd(pid, first, int(words[2], 16), proc) if call in POLLS and len(words) > 2 else first & 0xFFFFFFFF
    if fd is None or call not in OF_A_FILE | POLLS:
        return Blocked(call=call, alone_on_fd0=call in SELECTS and first == 1)
    target = read_link(proc / str(pid) / "fd" / str(fd))
    kind = _KINDS.match(target)
    return Blocked(
        call=call,
        fd=fd,
        file=kind[1] if kind else target or None,
        remote=_remote(target, pid, proc),
        alone_on_fd0=fd == 0 and call in WAITS_FOR_INPUT,
    )


def _polled_fd(pid: int, address: int, count: int, proc: Path) -> int | None:
    """Return the only descriptor that poll(2) was given, or None if there are several or we may not read it."""
    if count != 1:
        return None
    try:
        with (proc / str(pid) / "mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            found: int = POLL_FD.unpack(memory.read(POLL_FD.size))[0]
    except (OSError, ValueError, OverflowError, struct.error):
        return None
    return found if found >= 0 else None


def read_kernel_function(pid: int, proc: Path = PROC) -> str | None:
    """Return the kernel function that the main thread sleeps in, or None if it runs or the kernel hides it."""
    name = read_text(proc / str(pid) / "wchan").strip()
    return name if name not in {"", "0"} else None


def _remote(target: str, pid: int, proc: Path) -> str | None:
    """Return the remote address of a TCP socket, found by its inode."""
    if not target.startswith("socket:["):
        return None
    inode = int(target.removeprefix("socket:[").rstrip("]"))
    return next((row.remote for row in read_rows(pid, proc) if row.inode == inode), None)
