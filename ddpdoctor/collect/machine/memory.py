"""Reads how much memory a host, a control group and /dev/shm have in use."""

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
SHARED = "/dev/shm"  # noqa: S108 - looked at, not written to


def read_group() -> Space | None:
    """Return the limit of the control group that leaves the least, and its use without what can be dropped."""
    limit = read_memory_limit()
    return None if limit is None else Space(limit_bytes=limit.limit_bytes, used_bytes=limit.used_bytes)


def read_machine(proc: Path = PROC) -> Space | None:
    """Return all memory of the machine, and how much of it is not available."""
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
    """Return the size of /dev/shm and what is used of it; None where there is none, or none with a limit."""
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
"""By the field of ``HostCauses``."""
