"""Runs one Python process as a rank, without a launcher: bare, and with the recorder in it."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddpdoctor.recorder
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_reading import DamagedRingError, RingContent, read_ring_file
from tests.scenarios.running import clean_environment, free_port

RECORDER = Path(ddpdoctor.recorder.__file__).parent
LIMIT_S = 550


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it wrote."""

    status: int
    stdout: bytes
    stderr: bytes


def make_folder(path: Path) -> Path:
    """Make the folder that the watcher makes for recorders."""
    for name in ("rings", "evidence"):
        (path / name).mkdir(parents=True)
    (path / "control").write_bytes(bytes(ring_layout.CONTROL_SIZE))
    return path


def run_bare(*args: str, **env: str) -> Ended:
    """Run Python as the only rank of a job, as torchrun would without ddpdoctor."""
    return _run(args, {**_variables(), **env})


def run_recorded(folder: Path, *args: str, recorder: Path = RECORDER, **env: str) -> Ended:
    """Run the same with the recorder, which writes to ``folder``; ``recorder`` is where its files are."""
    path = os.pathsep.join(filter(None, (str(recorder / "bootstrap"), env.pop("PYTHONPATH", ""))))
    ours = {"PYTHONPATH": path, "DDPDOCTOR_RUN": str(folder), "DDPDOCTOR_AGENT": str(os.getpid())}
    return _run(args, {**_variables(), **ours, **env})


def read_rings(folder: Path, role: int = ring_layout.ROLE_RANK) -> list[RingContent]:
    """Return what processes of a role left."""
    contents = [read_ring_file(path) for path in sorted((folder / "rings").glob("*.ring"))]
    return [content for content in contents if content.role == role]


def defects(folder: Path) -> list[Any]:
    """Return what the recorder said of its own failures, in rings and beside them: all of it becomes DD901."""
    notes = [note for ring in _whole_rings(folder) for note in ring.notes if note.get("k") == "defect"]
    return [*(json.dumps(note) for note in notes), *(path.read_text() for path in folder.glob("lost-*"))]


def _whole_rings(folder: Path) -> Iterator[RingContent]:
    """Yield the rings of ranks. One whose own start was broken on purpose may be empty."""
    for path in sorted((folder / "rings").glob("*.ring")):
        with contextlib.suppress(DamagedRingError):
            content = read_ring_file(path)
            if content.role == ring_layout.ROLE_RANK:
                yield content


def _variables() -> dict[str, str]:
    return clean_environment(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )  # fmt: skip


def _run(args: tuple[str, ...], env: dict[str, str]) -> Ended:
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, stdin=subprocess.DEVNULL, env=env, check=False, timeout=LIMIT_S
    )
    return Ended(done.returncode, done.stdout, done.stderr)
