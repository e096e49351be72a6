"""Reads a path's file system, and whether other hosts may use it too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.collect.system import System

if TYPE_CHECKING:
    from pathlib import Path

SHARED_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"})


def is_shared(path: Path, system: System | None = None) -> bool:
    """Return whether a path is on a file system that other hosts may use."""
    kind = mount_of(system or System(), str(path))[1] or ""
    return kind.removeprefix("fuse.") in SHARED_FILE_SYSTEMS


def mount_of(system: System, path: str) -> tuple[str, str | None]:
    """Return the mount point of a path, and the type of its file system (None if unknown)."""
    best, fstype = "", None
    for line in system.text_or("/proc/mounts").splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code.group(1), 8)), words[1])
        within = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts at the same point, the later one is visible.
        if within and len(point) >= len(best):
            best, fstype = point, words[2]
    return best or "/", fstype
