"""Which processes have asked to be watched in a run folder, and how each of them left.

No launcher says so where ranks call ``ddpdoctor.watch`` themselves. Each has a file of its own, so nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.launch.processes.stopping import Target, is_same
from ddpdoctor.recorder.storage.files import make_folder, read_plain, remove, write_whole

if TYPE_CHECKING:
    from pathlib import Path

PRESENT = "present"
LEFT = "left"
"""Subfolders of a run folder, with a file PID-TICKS for each process."""


class Leaving(Enum):
    """How a process left the watch."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """The processes that have come so far."""

    present: dict[Target, str] = field(default_factory=dict)
    """Those that live and have not left, each with its number from the launcher, or ""."""
    left: dict[Target, Leaving] = field(default_factory=dict)
    gone: frozenset[Target] = frozenset()
    """Those that have ended without leaving."""


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
    """Return who is there and who was."""
    came = {process: _read(folder, PRESENT, process) for process in _listed(folder / PRESENT)}
    present = {process: number for process, number in came.items() if is_same(*process)}
    left = {process: _leaving(_read(folder, LEFT, process)) for process in _listed(folder / LEFT)}
    return Attendance(present=present, left=left, gone=frozenset(came.keys() - present.keys() - left.keys()))


def _file(folder: Path, name: str, process: Target) -> Path:
    return folder / name / f"{process[0]}-{process[1]}"


def _listed(folder: Path) -> list[Target]:
    try:
        names = [path.name.split("-") for path in folder.iterdir()]
    except OSError:
        return []
    return [(int(name[0]), int(name[1])) for name in names if len(name) == 2 and all(map(str.isdecimal, name))]


def _read(folder: Path, name: str, process: Target) -> str:
    try:
        return read_plain(_file(folder, name, process)).decode(errors="replace")
    except OSError:
        return ""


def _leaving(text: str) -> Leaving:
    return Leaving(text) if text in {one.value for one in Leaving} else Leaving.DONE
