"""Finds the folders of this process's control groups, and reads their limits.

It reads versions 1 and 2. /proc/self/cgroup names the group, and every group above it also limits it. In a container
with its own cgroup namespace, the path is "/". In one without, it is the host's path, and only the mount's top exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.collect.files import read_text
from ddpdoctor.model.causes import Space

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
UNLIMITED_BYTES = 1 << 60
"""More than any machine has; version 1 writes "no limit" as the largest multiple of the page size below 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit(Space):
    """A limit on memory, the use that counts against it, and how often the kernel has killed a process for it."""

    oom_kills: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimit:
    """A limit on processes and threads."""

    max: int
    current: int


def cgroup_folders(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[Path, ...]:
    """Return the existing folders for a controller: this process's own group first, then those above it."""
    found: list[Path] = []
    for line in read_text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            tops = [cgroups, cgroups / "unified"]
        elif controller in controllers.split(","):
            tops = [cgroups / controller, cgroups / controllers]
        else:
            continue
        found += [folder for top in tops for folder in _upwards(top, path)]
    return tuple(dict.fromkeys(folder for folder in [*found, cgroups] if folder.is_dir()))


def _upwards(top: Path, path: str) -> list[Path]:
    """Return the folder of a group and all above it, but only the top for a path that leads out of the namespace."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    return [top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _oom_kills(folder: Path) -> int | None:
    """Return how often the kernel has killed a process of a group for memory, or None if it does not count."""
    for name in ("memory.events", "memory.oom_control"):
        match = re.search(r"^oom_kill (\d+)$", read_text(folder / name), re.MULTILINE)
        if match:
            return int(match.group(1))
    return None


def read_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return how often the kernel has killed a process of our group for memory, or None if that cannot be read."""
    counts = map(_oom_kills, cgroup_folders("memory", proc, cgroups))
    return next((count for count in counts if count is not None), None)


def read_memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryLimit | None:
    """Return the memory limit that leaves the least, or None if there is no limit."""
    read = (_memory_of(folder) for folder in cgroup_folders("memory", proc, cgroups))
    found = [one for one in read if one is not None]
    return min(found, key=lambda one: one.limit_bytes - one.used_bytes, default=None)


def _memory_of(folder: Path) -> MemoryLimit | None:
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= UNLIMITED_BYTES:
        return None
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    # The kernel drops inactive page cache when a job needs memory.
    stat = _hierarchical(read_text(folder / "memory.stat"))
    cache = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return MemoryLimit(
        limit_bytes=limit,
        used_bytes=max(0, used - (int(cache.group(1)) if cache else 0)),
        oom_kills=_oom_kills(folder),
    )


def _hierarchical(stat: str) -> str:
    """Keep only version 1's counts that include child groups, if there are any."""
    total = [line for line in stat.splitlines() if line.startswith("total_")]
    return "\n".join(total) or stat


def read_cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Return the CPU quota in CPUs, or None if there is no quota."""
    found = [_quota_of(folder) for folder in cgroup_folders("cpu", proc, cgroups)]
    return min((quota for quota in found if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    words = read_text(folder / "cpu.max").split() or [
        read_text(folder / "cpu.cfs_quota_us").strip(),
        read_text(folder / "cpu.cfs_period_us").strip(),
    ]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


def read_task_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> TaskLimit | None:
    """Return the limit on processes and threads that leaves the fewest, or None if there is no limit."""
    found: list[TaskLimit] = []
    for folder in cgroup_folders("pids", proc, cgroups):
        most, current = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None and current is not None:
            found.append(TaskLimit(max=most, current=current))
    return min(found, key=lambda one: one.max - one.current, default=None)


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None
