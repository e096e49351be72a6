"""Reads the memory use of the host, the control group and /dev/shm."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.files import read_text
from ddpdoctor.collect.machine.cgroups import read_memory_limit
from ddpdoctor.model.causes import Space

if TYPE_CHECKING:
    from collections.abc import Callable

PROC = Path("/proc")
SHARED = "/dev/shm"  # noqa: S108 - only read


def read_machine(proc: Path = PROC) -> Space | None:
    """Return the machine's total memory, and how much of it is not available."""
    found = parse_meminfo(read_text(proc / "meminfo"))
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    return None if total is None or available is None else Space(limit_bytes=total, used_bytes=total - available)


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the sizes in /proc/meminfo in bytes, by name."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def read_shared() -> Space | None:
    """Return the size and use of /dev/shm, or None if it does not exist or has no limit."""
    try:
        stat = os.statvfs(SHARED)
    except OSError:
        return None
    total = stat.f_frsize * stat.f_blocks
    return Space(limit_bytes=total, used_bytes=total - stat.f_frsize * stat.f_bavail) if total else None


READERS: dict[str, Callable[[], Space | None]] = {
    "group": read_memory_limit,
    "machine": read_machine,
    "shared_memory": read_shared,
}
"""The readers by field of ``HostCauses``."""
