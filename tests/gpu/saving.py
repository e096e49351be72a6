"""Saves what a run on a GPU saw, as it comes, so that a run that is cut off still shows what it saw until then.

One folder with few files: ``index.json`` (each test and job), ``summary.md`` (the same to read), and ``runs-N.tar.gz``
(the folder of each job; unpack with ``tar xzif``, since each job appends an archive of its own).
"""

import json
import platform
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.gpu.catalog import ONLY_A_DEVICE
from tests.gpu.running import Done

PART_BYTES, PARTS = 14 * 2**20, 4
"""A machine that is lent may give back 8 files of 16 MiB each, 64 MiB in all."""
MOST_STDERR = 4000
MOST_FILE_BYTES = 64 * 2**20
"""Larger files of a job stay where they are."""


class Results:
    """The folder of results. All calls may come from any thread."""

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        """``machine`` says what the tests ran on."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = threading.Lock()
        self._index: dict[str, Any] = {"machine": machine, "tests": [], "jobs": [], "left_out": []}
        self._write()

    def job_ended(self, done: Done) -> None:
        """Save the folder of a job, and what came of it."""
        verdict = done.report.get("verdict") or {}
        entry = {
            "name": done.job.name, "command": list(done.job.command), "env": dict(done.job.env), "status": done.status,
            "problem": done.problem, "began_s": round(done.began_s, 1), "took_s": round(done.took_s, 1),
            "verdict": {key: verdict.get(key) for key in ("code", "kind", "ranks", "confidence", "summary")},
            "result": done.result, "stderr": done.stderr[-MOST_STDERR:],
        }  # fmt: skip
        with self._lock:
            self._index["jobs"].append(entry)
            if done.folder.exists():
                self._pack(done)
            self._write()

    def test_ended(self, name: str, shows: str, outcome: str, reason: str) -> None:
        """Save the outcome of a test."""
        with self._lock:
            self._index["tests"].append({"name": name, "shows": shows, "outcome": outcome, "reason": reason})
            self._write()

    def _pack(self, done: Done) -> None:
        part = next((path for path in self._parts() if not path.exists() or path.stat().st_size < PART_BYTES), None)
        if part is None:
            self._index["left_out"].append(done.job.name)
            return
        before = part.stat().st_size if part.exists() else 0
        with part.open("ab") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            archive.add(done.folder, arcname=done.job.name, filter=_small)
        if part.stat().st_size > 16 * 2**20:
            with part.open("r+b") as out:
                out.truncate(before)
            self._index["left_out"].append(done.job.name)

    def _parts(self) -> list[Path]:
        return [self.folder / f"runs-{number}.tar.gz" for number in range(1, PARTS + 1)]

    def _write(self) -> None:
        self._index["written_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        _replace(self.folder / "index.json", json.dumps(self._index, indent=1) + "\n")
        _replace(self.folder / "summary.md", render_summary(self._index))


def _small(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return member if member.isdir() or (member.isfile() and member.size < MOST_FILE_BYTES) else None


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def render_summary(index: dict[str, Any]) -> str:
    """Return the index as a page to read."""
    counts: dict[str, int] = {}
    for test in index["tests"]:
        counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
    machine = [f"- {name}: {value}" for name, value in index["machine"].items()]
    tests = [
        f"| {test['outcome']} | {test['name']} | {_cell(test['shows'])} | {_cell(test['reason'])} |"
        for test in index["tests"]
    ]
    jobs = [
        f"| {job['name']} | {job['problem'] or job['status']} | {job['began_s']} | {job['took_s']} | {_verdict(job)} | "
        f"{_cell(json.dumps(job['result'])) if job['result'] else ''} |"
        for job in index["jobs"]
    ]
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    only = [f"- {what}: {', '.join(names)}" for what, names in ONLY_A_DEVICE.items()]
    return "\n".join([
        "# GPU tests", "", total or "nothing ended yet", "",
        *machine, "", "Only a real device shows:", "", *only, "",
        "| outcome | test | what it shows | reason |", "|---|---|---|---|", *tests, "",
        "| job | exit status | began s | took s | verdict | result |", "|---|---|---|---|---|---|", *jobs, "",
        *([f"Not packed, too large: {', '.join(index['left_out'])}", ""] if index["left_out"] else []),
    ])  # fmt: skip


def _verdict(job: dict[str, Any]) -> str:
    verdict = job["verdict"]
    return _cell(f"{verdict['kind']} {verdict['ranks']}: {verdict['summary']}") if verdict["kind"] else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:600]


def read_machine() -> dict[str, Any]:
    """Return what the tests run on; no context is made on a GPU."""
    import torch

    import ddpdoctor

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    query = "--query-gpu=name,driver_version,memory.total"
    return {
        "gpu, driver, memory": _said("nvidia-smi", query, "--format=csv,noheader"),
        "torch": torch.__version__, "CUDA of torch": torch.version.cuda, "NCCL": nccl,
        "python": platform.python_version(), "kernel": platform.release(), "ddpdoctor": ddpdoctor.__version__,
        "commit": _said("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def _said(*command: str) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return ran.stdout.strip() or f"not known: {ran.stderr.strip()[:200]}"
