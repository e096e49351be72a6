"""Makes the run folder before anything is started: new, private, and known to be writable."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from datetime import datetime

PARENT = Path("ddpdoctor-report")
PRIVATE = 0o700
REPORT_NAME = "report.json"
RUN_MARKS = (REPORT_NAME, "run.json")
"""A folder that holds one of these is another run's; a run that was cut short has no report yet."""
_HELP = "Nothing was started. Choose another folder with --report-dir."


def make_default_dir(script: str, *, is_module: bool, now: datetime, label: str = "") -> Path:
    """Make ``ddpdoctor-report/<time>-<script>`` below the working directory, with a number where it is taken.

    ``label`` tells one member of a job from others, whose clocks may show the same.
    """
    base = f"{now:%Y%m%d-%H%M%S}-{name_stem(script, is_module=is_module)}{f'-node-{label}' if label else ''}"
    try:
        PARENT.mkdir(mode=PRIVATE, exist_ok=True)
        for number in itertools.count(1):
            path = PARENT / (base if number == 1 else f"{base}-{number}")
            if _make_new(path):
                return _check_writable(path)
    except OSError as error:
        raise _refuse(PARENT, error) from error
    raise AssertionError  # pragma: no cover: count() has no end


def name_stem(script: str, *, is_module: bool) -> str:
    """Return what a folder is called after a script or module."""
    name = script.rpartition(".")[2] if is_module else Path(script).stem
    return re.sub(r"[^\w.-]", "_", name) or "job"


def make_private(path: Path) -> None:
    """Make a folder that only its owner may read; one with something in it stays as it is."""
    try:
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if not any(path.iterdir()):
            path.chmod(PRIVATE)
    except OSError as error:
        raise _refuse(path, error) from error


def make_report_dir(path: Path) -> Path:
    """Make the folder that the user named; one that is there already may be used unless it holds a run."""
    make_private(path)
    if any((path / mark).exists() for mark in RUN_MARKS):
        raise UserError(f"the report folder {path} already holds another run", help=_HELP)
    return _check_writable(path)


def _make_new(path: Path) -> bool:
    try:
        path.mkdir(mode=PRIVATE)
    except FileExistsError:
        return False
    return True


def _check_writable(path: Path) -> Path:
    """Write a file and take it away again: permissions alone do not tell (read-only mounts, full disks, quotas)."""
    trial = path / f".writable-{os.getpid()}"
    try:
        trial.write_bytes(b"ddpdoctor")
        trial.unlink()
    except OSError as error:
        raise _refuse(path, error) from error
    return path


def _refuse(path: Path, error: OSError) -> UserError:
    return UserError(f"the report folder {path} is not writable: {error.strerror}", help=_HELP)
