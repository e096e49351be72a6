"""Reads the memory use of the host, the control group and /dev/shm."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.machine.cgroups import read_memory_limit
from ddpdoctor.model.causes import Space

if TYPE_CHECKING:
    from collections.abc import Callable

PROC = Path("/proc")
SHARED = "/dev/shm"  # noqa: S108 - only read


def read_group() -> Space | None:
    """Return the tightest control group limit, and the use that counts against it, without droppable cache."""
    limit = read_memory_limit()
    return None if limit is None else Space(limit_bytes=limit.limit_bytes, used_bytes=limit.used_bytes)


def read_machine(proc: Path = PROC) -> Space | None:
    """Return the machine's total memory, and how much of it is not available."""
    try:
        text = (proc / "meminfo").read_text()
    except OSError:
        return None
    kib = dict(re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB$", text, re.MULTILINE))
    if len(kib) < 2:
        return None
    total = int(kib["MemTotal"]) * 1024
    return Space(limit_bytes=total, used_bytes=total - int(kib["MemAvailable"]) * 1024)


def read_shared() -> Space | None:
    """Return the size and use of /dev/shm, or None if it does not exist or has no limit."""
    try:
        stat = os.statvfs(SHARED)
    except OSError:
        return None
    total = stat.f_frsize * stat.f_blocks
    return Space(limit_bytes=total, used_bytes=total - stat.f_frsize * stat.f_bavail) if total else None


READERS: dict[str, Callable[[], Space | None]] = {
    "group": read_group,
    "machine": read_machine,
    "shared_memory": read_shared,
}
"""The readers by field of ``HostCauses``."""
