"""Keeps recorders off shared file systems: they write to a folder of this host, which is copied at the job's end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from ddpdoctor.collect.file_system import is_shared


def choose_folder(run_dir: Path) -> Path:
    """Return where recorders write: the run folder, or a folder of this host's where that one is shared."""
    if not is_shared(run_dir):
        return run_dir
    return Path(tempfile.mkdtemp(prefix="ddpdoctor-"))


def copy_back(folder: Path, run_dir: Path) -> None:
    """Put what was recorded elsewhere into the run folder."""
    if folder != run_dir:
        with contextlib.suppress(OSError):
            shutil.copytree(folder, run_dir, dirs_exist_ok=True)
