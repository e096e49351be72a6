"""Chooses a local folder for the recorders if the run folder is on a shared file system, is full, or fails later."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.limits import is_shared

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "ddpdoctor-"
MIN_FREE_BYTES = 8 * 2**20
"""Our choice: the reserve for evidence plus the rings of three ranks."""
MIN_FREE_FILES = 64
"""Our choice: the number of files that a job of eight ranks writes."""


def choose_folder(run_dir: Path) -> Path:
    """Return where recorders write: the run folder, or a local one if that is shared or full."""
    shared = is_shared(run_dir)
    if not shared and has_space(run_dir):
        return run_dir
    try:
        local = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError:
        return run_dir
    if shared or has_space(local):
        return local
    local.rmdir()
    return run_dir


def has_space(folder: Path) -> bool:
    """Return whether the folder's file system has room for a record; True if that is unknown."""
    try:
        free = os.statvfs(folder)
    except OSError:
        return True
    has_files = not free.f_files or free.f_favail >= MIN_FREE_FILES  # a file system without inode counts says 0 of 0
    has_bytes = free.f_bavail * free.f_frsize >= MIN_FREE_BYTES
    return has_files and has_bytes and not free.f_flag & os.ST_RDONLY


def copy_back(folder: Path, run_dir: Path) -> None:
    """Copy a local record into the run folder if there is room."""
    if folder != run_dir and has_space(run_dir):
        with contextlib.suppress(OSError):
            shutil.copytree(folder, run_dir, dirs_exist_ok=True)


def copy_elsewhere(folder: Path, files: Mapping[str, str]) -> Path | None:
    """Return a copy of a run folder plus files that could not be written to it, or None if there is no room."""
    try:
        copy = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError:
        return None
    try:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        for name, text in files.items():
            (copy / name).write_text(text)
    except OSError:
        shutil.rmtree(copy, ignore_errors=True)
        return None
    return copy
