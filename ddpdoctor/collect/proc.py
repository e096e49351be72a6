"""Reads files that may be gone, and processes from /proc: state, parents, I/O, and how processes ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.model.words import grouped
from ddpdoctor.recorder.storage.secrets import hide_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_CHARACTERS = 4 * 2**20 - 1  # our choice: 30,000 connections; the kernel refuses to read 4 MiB of /proc/sys
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MOST_COMMAND = 200  # how many characters of a command line we keep
MOST_THREADS = 32  # our choice: a rank has a main thread and those of backends
_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO in linux/pidfd.h with the 64-byte struct of its first version, since Linux 6.13
_WANTS_EXIT = 1 << 3  # PIDFD_INFO_EXIT, since Linux 6.15; the kernel answers once the parent has waited for the process
_INFO = struct.Struct("<Q52xi")  # the struct's mask at its start, and exit_code at its end


def read_text(path: Path) -> str:
    """Return a file's text, or an empty string if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MOST_CHARACTERS)
    except OSError:
        return ""


def read_link(path: Path) -> str:
    """Return where a link leads, or an empty string if it cannot be read."""
    try:
        return str(path.readlink())
    except OSError:
        return ""


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, or [] if it cannot be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - there can be thousands, and only names are used
    except OSError:
        return []


def list_pids(proc: Path) -> list[int]:
    """Return the pids of all processes that can be seen."""
    return sorted(int(name) for name in list_names(proc) if name.isdecimal())


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process from /proc/PID/stat; ``start_ticks`` distinguishes it from a later one with the same pid."""

    pid: int
    ppid: int
    state: str
    start_ticks: int
    cpu_ticks: int  # CPU time of all its threads so far, in clock ticks (1/100 s on Linux)
    name: str
    rss_bytes: int = 0  # resident memory; 0 for a zombie
    exit_status: int | None = None  # a zombie's status as wait(2) returns it (field 52 in proc(5)), or None


@dataclass(frozen=True, slots=True, kw_only=True)
class IoBytes:
    """Bytes that went through read(2) and write(2) for files, pipes and terminals, whether from disk or cache."""

    read: int
    written: int
    fetched: int = 0  # from a disk, with page faults: libraries are loaded that way, not through read(2)


def read_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """Return a process, or None if no process has that pid."""
    head, _, tail = read_text(proc / str(pid) / "stat").rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    return Process(
        pid=pid, ppid=int(fields[1]), state=fields[0], start_ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]), name=head.partition("(")[2],
        rss_bytes=max(0, int(fields[21])) * PAGE_BYTES if len(fields) > 21 else 0,
        exit_status=int(fields[49]) if fields[0] in "ZX" and len(fields) > 49 else None,
    )  # fmt: skip


def read_wanted_ns(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return how long the main thread ran or waited for a core (sched-stats.rst), if CONFIG_SCHED_INFO tells."""
    times = read_text(proc / str(pid) / "schedstat").split()
    return int(times[0]) + int(times[1]) if len(times) > 1 else None


def read_run_delays(pid: int, proc: Path = Path("/proc")) -> dict[int, int]:
    """Return for how many ns each of a process's first threads was ready without a core; {}: not counted."""
    folder = proc / str(pid) / "task"
    delays = {}
    for thread in list_pids(folder)[:MOST_THREADS]:
        times = read_text(folder / str(thread) / "schedstat").split()
        if len(times) > 1:
            delays[thread] = int(times[1])
    return delays


def read_processes(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Return all processes by pid."""
    found = (read_process(pid, proc) for pid in list_pids(proc))
    return {process.pid: process for process in found if process is not None}


def descendants(pid: int, processes: dict[int, Process]) -> tuple[Process, ...]:
    """Return all processes below ``pid``, nearest first."""
    return below(pid, by_parent(processes))


def by_parent(processes: dict[int, Process]) -> dict[int, list[Process]]:
    """Return the children of each process, by pid; callers reuse it for many processes."""
    return grouped((process.ppid, process) for process in processes.values())


def below(pid: int, children: dict[int, list[Process]]) -> tuple[Process, ...]:
    """Return all processes below ``pid``, nearest first, from the result of ``by_parent``."""
    family = list(children.get(pid, ()))
    for process in family:
        family.extend(children.get(process.pid, ()))
    return tuple(family)


def read_command(pid: int) -> str:
    """Return a process's command line without secrets, cut to ``MOST_COMMAND``, or empty if it cannot be read."""
    words = read_text(Path(f"/proc/{pid}/cmdline")).split("\0")
    text = " ".join(hide_secrets(tuple(word for word in words if word)))
    return text if len(text) <= MOST_COMMAND else text[: MOST_COMMAND - 1] + "…"


def has_variables(pid: int, variables: Mapping[str, str]) -> bool:
    """Return whether a process started with these environment variables, or False if we may not read that."""
    environment = read_environment(pid)
    return all(os.fsencode(f"{name}={value}") in environment for name, value in variables.items())


def read_environment(pid: int) -> list[bytes]:
    """Return the variables with which a process started, such as b"RANK=0", or [] if we may not read them."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def read_io(pid: int, thread: int | None = None) -> IoBytes | None:
    """Return the bytes that a process, or one thread of it, has read and written, or None if we may not read that."""
    place = f"/proc/{pid}/io" if thread is None else f"/proc/{pid}/task/{thread}/io"
    values = dict(line.split(": ") for line in read_text(Path(place)).splitlines() if ": " in line)
    if not values:
        return None
    return IoBytes(
        read=int(values.get("rchar", 0)), written=int(values.get("wchar", 0)), fetched=int(values.get("read_bytes", 0))
    )


def read_status(pid: int | str, proc: Path = Path("/proc")) -> dict[str, str]:
    """Return the fields of /proc/PID/status (``pid`` may be "self"), or an empty dict if the process is gone."""
    lines = read_text(proc / str(pid) / "status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def catches_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, so that sending it cannot end the process."""
    mask = read_status(pid).get("SigCgt", "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def read_exit_code(pid: int, start_ticks: int, pidfd: int | None) -> int | None:
    """Return the exit status, or a signal below zero: /proc has a zombie's, and a pidfd opened before that later."""
    status = None
    process = read_process(pid)
    if process is not None and process.start_ticks == start_ticks:
        with contextlib.suppress(OSError):
            if os.geteuid() in (0, Path(f"/proc/{pid}").stat().st_uid):  # the kernel shows 0 to other users
                status = process.exit_status
    if status is None and pidfd is not None:
        info = bytearray(_INFO.size)
        _INFO.pack_into(info, 0, _WANTS_EXIT, 0)
        with contextlib.suppress(OSError):
            fcntl.ioctl(pidfd, _GET_INFO, info)
            answered, ended = _INFO.unpack(info)
            status = int(ended) if answered & _WANTS_EXIT else None
    return None if status is None else os.waitstatus_to_exitcode(status)


def safe_flags() -> list[str]:
    """Return the flags (of Python 3.11) that keep our child Pythons from importing from the current folder.

    That may be any user's, such as /tmp, and with ``-m`` and ``-c`` Python looks there first. If this process has the
    folder on its own path, as after ``python -m ddpdoctor``, its children have it too.
    """
    try:
        has_it = bool({"", str(Path.cwd())}.intersection(sys.path))
    except FileNotFoundError:  # the folder was removed
        has_it = False
    return [] if has_it or sys.version_info < (3, 11) else ["-P"]
