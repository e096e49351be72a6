"""Reads from /proc/locks who holds a lock on a file, and who waits for it.

A line is "1: FLOCK  ADVISORY  WRITE 6620 fe:00:2148269 0 EOF". A "->" after the number means that the process waits for
the lock of that number. The kernel shows no path, so we match device and inode with the process's open files.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.collect.files import list_names, read_text
from ddpdoctor.collect.process.proc import read_command
from ddpdoctor.model.causes import FileLock

PROC = Path("/proc")
KINDS = {"FLOCK": "flock", "POSIX": "fcntl", "OFDLCK": "ofd"}
_LINE = re.compile(
    r"^(?P<number>\d+): +(?P<waits>->\s+)?(?P<kind>\w+) +\w+ +\w+ +(?P<pid>-?\d+) "
    r"(?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+):(?P<inode>\d+) "
)
MOST_OTHERS = 8
"""How many locks of other processes we keep for one that polls. Our choice: more would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLine:
    """One line of /proc/locks."""

    number: int
    waits: bool
    kind: str
    pid: int
    file: tuple[int, int]
    """Device and inode."""

    def is_of(self, seen: os.stat_result) -> bool:
        """Return whether the lock is on a file; on overlay and btrfs, stat has another device, so the inode must do."""
        return seen.st_ino == self.file[1] and (seen.st_dev == self.file[0] or os.major(self.file[0]) == 0)


def read_lines(proc: Path = PROC) -> tuple[LockLine, ...]:
    """Return all locks that this process may see."""
    found = (_LINE.match(line) for line in read_text(proc / "locks").splitlines())
    return tuple(
        LockLine(
            number=int(one["number"]),
            waits=one["waits"] is not None,
            kind=KINDS[one["kind"]],
            pid=int(one["pid"]),
            file=(os.makedev(int(one["major"], 16), int(one["minor"], 16)), int(one["inode"])),
        )
        for one in found
        if one is not None and one["kind"] in KINDS
    )


def awaited_lock(pid: int, lines: tuple[LockLine, ...]) -> FileLock | None:
    """Return the lock that a process waits for in the kernel, and its holder, or None if it waits for none."""
    mine = next((line for line in lines if line.waits and line.pid == pid), None)
    if mine is None:
        return None
    held = next((line for line in lines if line.number == mine.number and not line.waits), None)
    holder = held.pid if held is not None and held.pid > 0 else None
    return FileLock(path=_path_of(mine, pid), kind=mine.kind, holder_pid=holder, holder=_name(holder))


def locks_of_others(pid: int, family: frozenset[int], lines: tuple[LockLine, ...]) -> tuple[FileLock, ...]:
    """Return the locks that other processes of ``family`` hold on files whose paths we can find, one for each file."""
    found = {}
    for line in lines:
        if line.waits or line.pid == pid or line.pid not in family:
            continue
        path = _path_of(line, line.pid)
        if path is not None:
            found[path, line.pid] = FileLock(path=path, kind=line.kind, holder_pid=line.pid, holder=_name(line.pid))
    return tuple(found.values())[:MOST_OTHERS]


def _path_of(line: LockLine, pid: int) -> str | None:
    """Return the path of a file that a process has open."""
    folder = PROC / str(pid) / "fd"
    for path in map(folder.joinpath, list_names(folder)):
        try:
            if line.is_of(path.stat()):
                return str(path.readlink())
        except OSError:
            continue
    return None


def _name(pid: int | None) -> str:
    return "" if pid is None else read_command(pid)
