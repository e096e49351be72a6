"""Kept runs: the folder of a real job, packed, which the real reader and the real judge judge again in a test.

A scenario marked ``kept`` is one test that is run in two ways. ``real`` starts its jobs. ``kept`` finds in the place of
each job what ``python -m tests.record`` has kept of it: its run folder, and its exit status. What the test holds of a
report is held of both, in the same words. See ``docs/design/0010-tests.md``.
"""

import ast
import contextlib
import hashlib
import io
import json
import re
import struct
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpdoctor.diagnose.job import rebuild_report
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.report.formats import parse_report, render_json
from ddpdoctor.report.text import render_text

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "data" / "kept"
JOBS = Path(__file__).parent / "scenarios" / "jobs"
ABOUT = "about.json"
LEFT_OUT = ("report.json", "torchrun.log", "control")
"""What no judge reads: the report is to be made again."""
MAX_BYTES = 70_000
RECORD = "python -m tests.record"


@dataclass(frozen=True)
class Job:
    """A job of ``jobs/``, and how it is run."""

    name: str
    options: tuple[str, ...]
    ranks: int
    args: tuple[str, ...]
    env: dict[str, str]

    def command(self, tmp_path: Path) -> list[Any]:
        """Return it in a form that is the same in each run of the test."""
        env = {name: value for name, value in self.env.items() if name != "PATH"}
        said = json.dumps([self.name, self.options, self.ranks, self.args, env])
        return list(json.loads(said.replace(str(tmp_path), "{tmp}")))


@dataclass
class Turn:
    """A test that is run in one of the ways: ``kept``, ``real``, or ``record``, which is real and is kept."""

    test: str
    way: str
    tmp_path: Path
    packed: dict[Path, bytes] = field(default_factory=dict)


_turn: list[Turn] = []


@contextlib.contextmanager
def turn_of(turn: Turn) -> Iterator[None]:
    """Have the jobs of a test taken from what is kept, or keep them once the test has passed."""
    _turn.append(turn)
    try:
        yield
        for path, packed in turn.packed.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed)
    finally:
        _turn.clear()


def sources_of(job: str) -> dict[str, str]:
    """Return a hash of each thing that a kept run was made from, and is out of date without."""
    plain = (int, str, bytes, tuple, dict, struct.Struct)
    layout = {
        name: value.format if isinstance(value, struct.Struct) else value
        for name, value in vars(ring_layout).items() if name.isupper() and isinstance(value, plain)
    }  # fmt: skip
    (script,) = found if (found := [JOBS / f"{job}.py"])[0].exists() else [
        path for path in JOBS.glob("*.py") if f"\ndef {job}(" in path.read_text()
    ]  # fmt: skip
    tree = ast.parse(text := script.read_text())
    ends = [node.end_lineno for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == job]
    imported = "|".join(path.stem for folder in (JOBS, script.parent) for path in folder.glob("*.py"))
    shared = {
        (script.parent if (script.parent / f"{name}.py").exists() else JOBS) / f"{name}.py"
        for name in re.findall(rf"^(?:from|import) ({imported})\b", text, re.MULTILINE)
    }  # fmt: skip
    said = {
        "layout": repr(sorted(layout.items())),
        "job": "\n".join([*(path.read_text() for path in sorted(shared)), *text.splitlines()[: (ends or [None])[0]]]),
    }
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in said.items()}


def take(job: Job, folder: Path) -> tuple[int, str, dict[str, Any]] | None:
    """Return status, text and report of the kept run of a job, unpacked into ``folder``; None if it is to be run."""
    if not _turn or _turn[0].way != "kept":
        return None
    command = job.command(_turn[0].tmp_path)
    path = path_of(command)
    assert path.exists(), f"no run of {command} is kept: `{RECORD} {job.name}`"
    with tarfile.open(path) as packed:
        packed.extractall(folder, filter="data")
    about = json.loads((folder / ABOUT).read_text())
    text = render_json(rebuild_report(folder))
    for here, there in (("root", ROOT), ("tmp", _turn[0].tmp_path)):
        text = text.replace(about[here], str(there))
    (folder / "report.json").write_text(text)
    shown = render_text(parse_report(text), width=None, color=False, run_dir=folder, cwd=ROOT)
    return about["status"], shown, json.loads(text)


def offer(job: Job, folder: Path, status: int) -> None:
    """Pack a run that has ended, to be kept if the test passes."""
    if not _turn or _turn[0].way != "record":
        return
    turn = _turn[0]
    torch = str(Path(find_spec("torch").origin).parents[4])  # type: ignore[union-attr, arg-type]
    hidden = {str(turn.tmp_path): "tmp", str(ROOT): "root", torch: "venv", sys.base_prefix: "python"}
    stands_for = {text: f"/{name}{'_' * len(text)}"[: len(text)] for text, name in hidden.items()}
    command = job.command(turn.tmp_path)
    about = {
        "test": turn.test, "command": command, "status": status, "sources": sources_of(job.name),
        "root": stands_for[str(ROOT)], "tmp": stands_for[str(turn.tmp_path)],
    }  # fmt: skip
    host = json.loads((folder / "run.json").read_text())["host"]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=9) as packed:
        _add(packed, ABOUT, json.dumps(about).encode())
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name not in LEFT_OUT:
                _add(packed, path.relative_to(folder).as_posix(), _without(path.read_bytes(), stands_for, host))
    turn.packed[path_of(command)] = buffer.getvalue()


def path_of(command: list[Any]) -> Path:
    """Return where the run of a command is kept: by what it says, so that another command has none."""
    job, _, ranks, args, env = command
    words = re.sub(r"[^a-z0-9]+", "-", " ".join([job, *args, *env.values()]).replace("{tmp}", "").lower())
    digest = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:6]
    return KEPT / f"{words.strip('-')[:48]}.{ranks}.{digest}.tar.xz"


def _without(data: bytes, stands_for: dict[str, str], host: str) -> bytes:
    """Return the bytes of a file without what tells of this machine. Paths keep their length: a ring counts bytes."""
    for text, other in stands_for.items():
        data = data.replace(text.encode(), other.encode())
    return data.replace(f'"{host}"'.encode(), b'"host"') if data[:1] in b"{[" else data


def _add(packed: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o600
    packed.addfile(entry, io.BytesIO(data))


def way_of(item: Any) -> str:
    """Return in which way a test takes its jobs; nothing if it is not marked ``kept``."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("way", "")) if callspec else ""


def read_about(path: Path) -> dict[str, Any]:
    """Return what a packed run says of itself, in its first file."""
    with tarfile.open(path) as packed:
        first = packed.next()
        said = packed.extractfile(first) if first is not None else None
        assert said is not None
        return dict(json.loads(said.read()))
