"""Keeps recorders off shared file systems: they write to a folder of this host, which is copied at the job's end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

SHARED_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"})


def choose_folder(run_dir: Path) -> Path:
    """Return where recorders write: the run folder, or a folder of this host's where that one is shared."""
    if _file_system(run_dir) not in SHARED_FILE_SYSTEMS:
        return run_dir
    return Path(tempfile.mkdtemp(prefix="ddpdoctor-"))


def _file_system(path: Path) -> str:
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, fs, *_ = line.split()
            if (path.is_relative_to(mount)) and len(mount) >= len(best):
                best, kind = mount, fs
    return kind.removeprefix("fuse.")


def copy_back(folder: Path, run_dir: Path) -> None:
    """Put what was recorded elsewhere into the run folder."""
    if folder != run_dir:
        with contextlib.suppress(OSError):
            shutil.copytree(folder, run_dir, dirs_exist_ok=True)
