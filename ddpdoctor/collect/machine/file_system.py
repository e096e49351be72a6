"""Reads a path's file system, and whether other hosts may use it too."""

from __future__ import annotations

import contextlib
from pathlib import Path

SHARED_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"})


def is_shared(path: Path) -> bool:
    """Return whether a path is on a file system that other hosts may use."""
    return file_system_of(path) in SHARED_FILE_SYSTEMS


def file_system_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of a path's file system, or an empty string if unknown."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, mount, fs, *_ = line.split()
            if path.is_relative_to(mount) and len(mount) >= len(best):
                best, kind = mount, fs
    return kind.removeprefix("fuse.")
