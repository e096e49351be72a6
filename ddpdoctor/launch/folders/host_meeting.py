"""Where ranks of one host that no ``wrap`` has started find their common run folder.

The file belongs to one launch of a job on this host. Whoever comes first writes which folder and which watcher it has;
the others read that. The watcher removes it under the same lock before it ends, so that no rank comes too late.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.folders.report_dir import make_private
from ddpdoctor.recorder.storage.files import open_plain, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpdoctor.launch.processes.stopping import Target

LAUNCH_VARIABLES = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""All ranks of one launch have the same values of these, and those of another launch have others."""
LOCK_LIMIT_S = 10.0
LOCK_EVERY_S = 0.02
MOST_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWatch:
    """The common run folder, and the process that watches it."""

    record: Path
    """Where ranks record: the run folder, unless that is on a shared file system or full."""
    run_dir: Path
    watcher: Target


def meeting_file(env: Mapping[str, str], asked: tuple[object, ...], process: Target) -> Path:
    """Return the file at which the ranks of this launch that ask for the same meet on this host.

    Without a launcher, a process is alone: the file is its own. Raises ``UserError`` if no private folder can be made.
    """
    values = [env.get(name, "") for name in LAUNCH_VARIABLES]
    if not any(values):
        values = [str(number) for number in process]
    text = "\0".join([*values, *map(str, asked), str(Path.cwd())])
    key = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    parent = Path(tempfile.gettempdir()) / f"ddpdoctor-watch-{os.getuid()}"
    make_private(parent)
    return parent / key


@contextlib.contextmanager
def locked(file: Path) -> Iterator[int]:
    """Hold the lock of a meeting, and give its open file. Raises ``TimeoutError`` if another process keeps it."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    while True:
        descriptor = open_plain(file, os.O_RDWR | os.O_CREAT)
        try:
            while not _lock(descriptor):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds {file}")
                time.sleep(LOCK_EVERY_S)
            if _is_at(descriptor, file):  # else a watcher has removed it meanwhile
                yield descriptor
                return
        finally:
            os.close(descriptor)  # this also unlocks it


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.lstat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_meeting(descriptor: int) -> HostWatch | None:
    """Return what the first process has written, or None before that."""
    text = os.pread(descriptor, MOST_BYTES, 0)
    try:
        plain = parse_json(text)
        pid, ticks = plain["watcher"]
        return HostWatch(record=Path(plain["record"]), run_dir=Path(plain["run_dir"]), watcher=(int(pid), int(ticks)))
    except (ValueError, KeyError, TypeError):
        return None


def write_meeting(descriptor: int, watch: HostWatch) -> None:
    """Write where the others find the folder."""
    plain = {"record": str(watch.record), "run_dir": str(watch.run_dir), "watcher": watch.watcher}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(plain).encode(), 0)
