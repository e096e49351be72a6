"""Reads a lock file that ranks poll for: whether it exists, how old it is, and whether its owner lives."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.files import list_pids
from ddpdoctor.collect.machine.file_system import is_shared
from ddpdoctor.collect.process.proc import read_command
from ddpdoctor.model.causes import LockFile, LockKind, Owner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.process.file_locks import LockLine

PROC = Path("/proc")
MOST_HOLDERS = 4
MOST_BYTES = 256
"""How much of the file we read: it holds a pid, and perhaps a host name."""
_OWNER = re.compile(r"\s*(?:pid\W{0,3})?(?P<pid>\d{1,8})(?:\s*\n(?P<host>[A-Za-z][\w.-]*))?(?=\s|$)", re.IGNORECASE)
"""A pid alone on its line, and perhaps its host on the next line, in filelock's format."""


def lock_of(evidence: dict[str, Any]) -> tuple[str | None, LockKind]:
    """Return the lock file that a rank polls for, and its kind; earlier recorders reported only the path."""
    lock = evidence.get("lock")
    if isinstance(lock, dict) and isinstance(lock.get("path"), str):
        known = {kind.value: kind for kind in LockKind}
        return lock["path"], known.get(str(lock.get("kind")), LockKind.KERNEL)
    path = evidence.get("lock_path")
    return (str(path) if path else None), LockKind.KERNEL


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
    """Return what we can see of a lock file; ``waiting`` are processes that poll for it and do not own it."""
    try:
        seen = os.stat(path)  # noqa: PTH116 - facts have their paths as strings
    except OSError:
        return LockFile(path=path, kind=kind, exists=False)
    holders, unseen = _holders(seen, {line.pid for line in lines if line.is_of(seen)}, waiting)
    pid, host = _named_owner(path) if stat.S_ISREG(seen.st_mode) else (None, None)
    elsewhere = host is not None and host != os.uname().nodename
    shared = is_shared(Path(path))
    known = pid is not None and not elsewhere and not (shared and host is None)
    return LockFile(
        path=path,
        kind=kind,
        exists=True,
        age_s=max(0.0, time.time() - seen.st_mtime),
        holders=tuple(Owner(pid=pid, command=read_command(pid)) for pid in holders[:MOST_HOLDERS]),
        unseen=unseen,
        named_pid=pid,
        named_lives=(PROC / str(pid)).exists() if known else None,
        named_host=host if elsewhere else None,
        shared=shared,
    )


def _holders(seen: os.stat_result, locking: set[int], waiting: frozenset[int]) -> tuple[list[int], int]:
    """Return who has the file open or locked, and how many processes of the file's owner we could not inspect."""
    found, unseen = [], 0
    for pid in list_pids(PROC):
        opened = False if pid in waiting else _has_open(pid, seen)
        if pid not in waiting and (opened or pid in locking):
            found.append(pid)
        elif opened is None and _owner_of(pid) == seen.st_uid:
            unseen += 1
    return found, unseen


def _has_open(pid: int, seen: os.stat_result) -> bool | None:
    """Return whether a process has the file open, or None if we may not read that."""
    folder = PROC / str(pid) / "fd"
    try:
        numbers = os.listdir(folder)  # noqa: PTH208 - only names are needed
    except PermissionError:
        return None
    except OSError:
        return False
    for number in numbers:
        try:
            one = (folder / number).stat()
        except OSError:
            continue
        if (one.st_dev, one.st_ino) == (seen.st_dev, seen.st_ino):
            return True
    return False


def _owner_of(pid: int) -> int | None:
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def _named_owner(path: str) -> tuple[int | None, str | None]:
    """Return the pid that the file names, as many lock files do, and the host if it names one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None, None
    try:
        match = _OWNER.match(os.read(fd, MOST_BYTES).decode(errors="replace"))
    except OSError:
        return None, None
    finally:
        os.close(fd)
    return (int(match["pid"]), match["host"]) if match else (None, None)
