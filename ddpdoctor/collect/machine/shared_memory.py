"""Reads the size of /dev/shm, and which files dead processes have left in it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from ddpdoctor.collect.machine.volumes import read_volume
from ddpdoctor.model.limits import SharedMemory

if TYPE_CHECKING:
    import os

    from ddpdoctor.collect.system import System

PLACE = "/dev/shm"  # noqa: S108 - only read
MIN_AGE_S = 600.0
"""Our choice: NCCL unlinks a segment as soon as both sides have opened it."""
FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The kernel's PROC_PID_INIT_INO. In this namespace we see every process of the machine."""
_OF_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")
"""/torch_PID_RANDOM_COUNTER, from the file_system sharing strategy (torch/csrc/.../StorageSharing.cpp)."""
_OF_NCCL = re.compile(r"nccl-\w{6}")


def read_shared_memory(
    system: System, uid: int | None, loader_workers: int, *, deep: bool
) -> SharedMemory | None:  # fmt: skip
    """Return facts about /dev/shm, or None if it does not exist."""
    if not system.exists(PLACE):
        return None
    stale = _stale_files(system, uid)
    return SharedMemory(
        volume=read_volume(system, PLACE, "shared memory", deep=deep),
        stale_files=tuple(sorted(stale)),
        stale_bytes=sum(stat.st_size for stat in stale.values()),
        loader_workers=loader_workers,
    )


def _stale_files(system: System, uid: int | None) -> dict[str, os.stat_result]:
    """Return files whose processes have certainly ended.

    In a container, the process may belong to another container or to the host, so we return nothing there. We skip
    other users' files, because their processes may be hidden, but root sees all processes.
    """
    if not _sees_all_processes(system):
        return {}
    found = {}
    for name in system.names(PLACE):
        path = f"{PLACE}/{name}"
        try:
            stat = system.path(path).stat()
        except OSError:
            continue
        own = uid in {0, stat.st_uid} or not system.live
        if own and _is_stale(system, name, time.time() - stat.st_mtime):
            found[path] = stat
    return found


def _sees_all_processes(system: System) -> bool:
    if not system.live:
        return True
    try:
        return system.path("/proc/self/ns/pid").stat().st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return False


def _is_stale(system: System, name: str, age_s: float) -> bool:
    of_torch = _OF_TORCH.fullmatch(name)
    if of_torch:
        return not system.exists(f"/proc/{of_torch.group(1)}") and age_s > MIN_AGE_S
    return _OF_NCCL.fullmatch(name) is not None and age_s > MIN_AGE_S and not _is_mapped(system, name)


def _is_mapped(system: System, name: str) -> bool:
    """Return whether any process has the file mapped; this is slow, so only files that look stale are checked."""
    place = f"{PLACE}/{name}"
    pids = (pid for pid in system.names("/proc") if pid.isdecimal())
    return any(place in system.text_or(f"/proc/{pid}/maps") for pid in pids)
