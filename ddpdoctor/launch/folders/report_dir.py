"""Creates the run folder before anything starts: new, private, and known to be writable."""

from __future__ import annotations

import errno
import itertools
import os
import pwd
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.storage.files import open_new, remove

if TYPE_CHECKING:
    from datetime import datetime

PARENT = Path("ddpdoctor-report")
PRIVATE = 0o700
REPORT_NAME = "report.json"
RUN_MARKS = (REPORT_NAME, "run.json")
"""A folder with one of these belongs to another run. A run that was cut short has no report."""
RUN_FILES = (
    *RUN_MARKS, "agent.jsonl", "consistency.json", "control", "control_flow.json", "end.json", "joint.json",
    "machine.json", "members.json", "moments.json", "nodes.json", "reached.json", "record.json", "replicas.json",
    "reserve", "source.json", "torchrun.log", "verdict.txt", "watch.json",
)  # fmt: skip
DUMPS = "dumps"
"""Reports that were made on demand while the job ran."""
RUN_FOLDERS = (DUMPS, "evidence", "gathered", "left", "nccl", "nodes", "present", "prints", "rings", "tuning")
"""The subfolders that a run writes to. They must not be links or belong to another user."""
_NO_PLACE = frozenset({errno.EACCES, errno.EDQUOT, errno.ENOENT, errno.ENOSPC, errno.EPERM, errno.EROFS})
"""Errors of a working directory that is read-only, full, another user's, or gone."""
_HELP = "Nothing was started. Choose another folder with --report-dir."
_HELP_OWN = "Nothing was started. Name a new folder with --report-dir."


def make_default_dir(script: str, *, is_module: bool, now: datetime, label: str = "") -> Path:
    """Create ``ddpdoctor-report/<time>-<script>`` in the working directory, with a number if it is taken.

    Where nothing can be written, it is a folder for temporary files, because the job itself may need no place there.
    ``label`` separates the members of a job, whose clocks may show the same time.
    """
    base = f"{now:%Y%m%d-%H%M%S}-{name_stem(script, is_module=is_module)}{f'-node-{label}' if label else ''}"
    try:
        _make_parent()
        for number in itertools.count(1):
            path = PARENT / (base if number == 1 else f"{base}-{number}")
            if _make_new(path):
                _check_parent(path)
                return path
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise refuse(PARENT, error) from error
        try:
            return Path(tempfile.mkdtemp(prefix=f"{PARENT}-{base}-"))
        except OSError:
            raise refuse(PARENT, error) from error
    raise AssertionError  # pragma: no cover: count() has no end


def make_dump_dir(run_dir: Path) -> Path:
    """Create the folder of the next report that is made on demand while a job runs: ``dumps/1``, ``dumps/2``.

    Raises ``UserError`` if it is not writable.
    """
    parent = run_dir / DUMPS
    try:
        parent.mkdir(mode=PRIVATE, exist_ok=True)
        for number in itertools.count(1):
            if _make_new(parent / str(number)):
                return parent / str(number)
    except OSError as error:
        raise UserError(
            f"{parent} is not writable: {error.strerror}", help="The evidence is taken, and the job goes on."
        ) from error
    raise AssertionError  # pragma: no cover: count() has no end


def name_stem(script: str, *, is_module: bool) -> str:
    """Return the part of a folder's name that comes from its script or module."""
    name = script.rpartition(".")[2] if is_module else Path(script).stem
    return re.sub(r"[^\w.-]", "_", name) or "job"


def make_private(path: Path) -> None:
    """Create a folder that only its owner may read; the mode of a non-empty one is not changed.

    Raises ``UserError`` if it is not writable, is a link, belongs to another user, or has links where a run writes.
    """
    is_new = False
    try:
        is_new = not path.exists()
        if path.parent == PARENT:
            _make_parent()
        if path.is_symlink():
            raise UserError(f"the report folder {path} is a link to {path.readlink()}", help=_HELP)
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        owner = _try_writing(path)
        _check_owner(path, owner)
        for name in (*RUN_FILES, *RUN_FOLDERS):
            _check_planted(path / name, owner)
        if not any(path.iterdir()):
            path.chmod(PRIVATE)
        if path.parent == PARENT:
            _check_parent(path)
    except OSError as error:
        if is_new:
            with suppress(OSError):  # it was not created, or somebody else is using it
                path.rmdir()
        raise refuse(path, error) from error


def make_report_dir(path: Path) -> Path:
    """Create the folder that the user named. An existing one is fine unless it holds a run."""
    make_private(path)
    if any((path / name).exists() for name in RUN_FILES) or any(map(_is_used, (path / "rings", path / "evidence"))):
        raise UserError(f"the report folder {path} already holds another run", help=_HELP)
    return path


def _is_used(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _make_parent() -> None:
    PARENT.mkdir(mode=PRIVATE, exist_ok=True)


def _check_parent(made: Path) -> None:
    """Refuse a ``ddpdoctor-report`` of another user, unless that user owns the working directory or is root."""
    trusted = {made.lstat().st_uid, 0, Path().stat().st_uid}
    if not {PARENT.lstat().st_uid, PARENT.stat().st_uid} <= trusted:
        raise UserError(f"the folder {PARENT} belongs to another user ({_user(PARENT.lstat().st_uid)})", help=_HELP)


def _try_writing(path: Path) -> int:
    """Write a file and remove it, because permissions are not enough (read-only mounts, full disks, quotas).

    Returns the owner of files that this process creates there: a network file system or a container may map the user.
    """
    trial = path / f".writable-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with os.fdopen(open_new(trial), "wb") as file:
            file.write(b"ddpdoctor")
            file.flush()
            return os.fstat(file.fileno()).st_uid
    finally:
        remove(trial)


def _check_owner(path: Path, owner: int) -> None:
    """Refuse another user's folder, because its owner could replace it with a link while the job runs."""
    seen = path.lstat().st_uid
    if seen != owner:
        raise UserError(f"the report folder {path} belongs to another user ({_user(seen)})", help=_HELP_OWN)


def _check_planted(path: Path, owner: int) -> None:
    """Refuse an existing path where a run would write, unless it is this user's own file or folder."""
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return
    wanted = stat.S_ISDIR if path.name in RUN_FOLDERS else stat.S_ISREG
    if stat.S_ISLNK(seen.st_mode):
        what = f"is a link to {path.readlink()}"
    elif not wanted(seen.st_mode):
        what = "is not a folder" if path.name in RUN_FOLDERS else "is not a file"
    elif seen.st_uid != owner:
        what = f"belongs to another user ({_user(seen.st_uid)})"
    else:
        return
    raise UserError(f"{path.name} in the report folder {path.parent} {what}", help=_HELP)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def _make_new(path: Path) -> bool:
    try:
        path.mkdir(mode=PRIVATE)
    except FileExistsError:
        return False
    return True


def refuse(path: Path, error: OSError) -> UserError:
    """Return the error for a run folder that is not writable."""
    return UserError(f"the report folder {path} is not writable: {error.strerror}", help=_HELP)
