"""Ranks that no ``wrap`` has started: where those of one host meet, who is watched, and how each of them left."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.run_folder import make_private
from ddpdoctor.launch.stopping import Target, is_same
from ddpdoctor.recorder.storage.files import make_folder, open_plain, parse_json, read_plain, remove, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# All ranks of one launch have the same values of these, and those of another launch have others.
LAUNCH_VARIABLES = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
LOCK_LIMIT_S = 10.0
LOCK_EVERY_S = 0.02
MOST_BYTES = 65536
PRESENT = "present"
LEFT = "left"  # subfolders of a run folder, with a file PID-TICKS for each process


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWatch:
    """The common run folder, and the process that watches it."""

    record: Path  # where ranks record: the run folder, unless that is on a shared file system or full
    run_dir: Path
    watcher: Target


def meeting_file(env: Mapping[str, str], asked: tuple[object, ...], process: Target) -> Path:
    """Return where ranks of this launch meet on this host; without one, each is alone. Raises ``UserError``."""
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
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another process holds {file}") from None
                    time.sleep(LOCK_EVERY_S)
            is_there = False
            with contextlib.suppress(FileNotFoundError):  # a watcher may have removed it meanwhile
                is_there = os.path.samestat(os.fstat(descriptor), file.lstat())
            if is_there:
                yield descriptor
                return
        finally:
            os.close(descriptor)  # this also unlocks it


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
    plain = {"record": str(watch.record), "run_dir": str(watch.run_dir), "watcher": watch.watcher}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(plain).encode(), 0)


class Leaving(Enum):
    """How a process left the watch."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """The processes that have come so far."""

    # Those that live and have not left, each with its number from the launcher, or "".
    present: dict[Target, str] = field(default_factory=dict)
    left: dict[Target, Leaving] = field(default_factory=dict)
    gone: frozenset[Target] = frozenset()  # those that have ended without leaving


def enter(folder: Path, process: Target, number: str) -> None:
    """Note that a process wants to be watched. Raises OSError."""
    for name in (PRESENT, LEFT):
        make_folder(folder / name)
    remove(_file(folder, LEFT, process))
    write_whole(_file(folder, PRESENT, process), number)


def leave(folder: Path, process: Target, how: Leaving) -> None:
    """Note that a process needs no watching any more. Raises OSError."""
    write_whole(_file(folder, LEFT, process), how.value)
    remove(_file(folder, PRESENT, process))


def read_attendance(folder: Path) -> Attendance:
    came, words = _read_processes(folder / PRESENT), _read_processes(folder / LEFT)
    present = {process: number for process, number in came.items() if is_same(*process)}
    known = {leaving.value for leaving in Leaving}
    left = {process: Leaving(word) if word in known else Leaving.DONE for process, word in words.items()}
    return Attendance(present=present, left=left, gone=frozenset(came.keys() - present.keys() - left.keys()))


def _file(folder: Path, name: str, process: Target) -> Path:
    return folder / name / f"{process[0]}-{process[1]}"


def _read_processes(folder: Path) -> dict[Target, str]:
    found: dict[Target, str] = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            name = path.name.split("-")
            if len(name) == 2 and all(map(str.isdecimal, name)):
                process = int(name[0]), int(name[1])
                found[process] = ""
                with contextlib.suppress(OSError):
                    found[process] = read_plain(path).decode(errors="replace")
    return found
