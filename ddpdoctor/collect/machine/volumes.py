"""Reads how much space is left on the file systems that a job writes to, and with --deep how fast they are."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.machine.file_system import mount_of
from ddpdoctor.model.limits import Volume

if TYPE_CHECKING:
    from ddpdoctor.collect.bounded import Reply
    from ddpdoctor.collect.system import System

LIMIT_S = 2.0
"""Needed because a network file system with a dead server blocks every caller."""
WRITE_S = 1.0
WRITE_LIMIT_S = 4.0
BLOCK = bytes(4 << 20)
MAX_WRITE_BYTES = 256 << 20
"""Our choice: enough to exceed a disk's caches, and little enough that nobody notices."""
TEMPORARY = frozenset({"temporary files", "/tmp"})  # noqa: S108 - purposes, no files
FREE_SHARE = 4
"""We write at most one part in this many of the free space."""


def read_volumes(system: System, *, deep: bool) -> tuple[Volume, ...]:
    """Return the file systems for temporary files, caches and the working directory, without repeats."""
    purposes: dict[str, list[str]] = {}
    paths: dict[str, str] = {}
    for purpose, path in _places(system):
        mount, _ = mount_of(system, path)
        purposes.setdefault(mount, []).append(purpose)
        paths.setdefault(mount, path)
    return tuple(
        replace(read_volume(system, path, ", ".join(of), deep=deep), temporary=not TEMPORARY.isdisjoint(of))
        for path, of in zip(paths.values(), purposes.values(), strict=True)
    )


def _places(system: System) -> list[tuple[str, str]]:
    cache = system.env.get("XDG_CACHE_HOME") or f"{system.env.get('HOME', '/root')}/.cache"
    found = [("temporary files", system.env.get("TMPDIR") or "/tmp"), ("cache", cache)]  # noqa: S108 - only read
    if system.env.get("TMPDIR"):
        found.append(("/tmp", "/tmp"))  # noqa: S108 - torch's flight recorder ignores TMPDIR
    found.append(("working directory", _working_directory(system)))
    return [(purpose, _existing(system, path)) for purpose, path in found]


def _working_directory(system: System) -> str:
    if not system.live:
        return system.env.get("PWD", "/")
    try:
        return os.getcwd()  # noqa: PTH109 - a System's paths are strings
    except OSError:
        return "/"


def _existing(system: System, path: str) -> str:
    """Return the nearest existing parent folder, because ~/.cache may not exist yet."""
    while len(path) > 1 and not system.exists(path):
        path = path.rstrip("/").rpartition("/")[0] or "/"
    return path


def read_volume(system: System, path: str, purpose: str, *, deep: bool) -> Volume:
    """Return one file system; if it does not answer, ``error`` says so."""
    size = ask_side_by_side({path: lambda: (system.calls.statvfs(path), system.calls.writable(path))}, LIMIT_S)[path]
    (total, free), writable = size.value or ((0, 0), False)
    speed = None
    if deep and writable and system.live:
        most = min(MAX_WRITE_BYTES, free // FREE_SHARE)
        speed = ask_side_by_side({path: lambda: measure_writing(path, most)}, WRITE_LIMIT_S)[path].value
    return Volume(
        path=path,
        purpose=purpose,
        fstype=mount_of(system, path)[1],
        total_bytes=total,
        free_bytes=free,
        writable=writable,
        write_mb_s=speed,
        error=_why_not(size),
        timed_out=size.timed_out,
    )


def _why_not(reply: Reply[Any]) -> str | None:
    if reply.timed_out:
        return f"did not answer within {LIMIT_S:.0f} s"
    return None if reply.error is None else reply.error.strerror or str(reply.error)


def measure_writing(path: str, max_bytes: int, limit_s: float = WRITE_S) -> float | None:
    """Write and sync for at most ``limit_s``; return the speed in MB/s, or None if there is no room.

    The file never has a name, so nothing stays behind, whatever happens.
    """
    if max_bytes < len(BLOCK):
        return None
    written = 0
    with tempfile.TemporaryFile(dir=path, buffering=0) as file:
        started = time.monotonic()
        while written + len(BLOCK) <= max_bytes and time.monotonic() - started < limit_s:
            written += os.write(file.fileno(), BLOCK)
            os.fsync(file.fileno())
        return written / 1e6 / max(time.monotonic() - started, 1e-9)
