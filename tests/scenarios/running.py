"""Runs a job of ``jobs/`` under the real command and reads what came of it."""

import ast
import contextlib
import fcntl
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddpdoctor.report
from ddpdoctor.diagnose.job import rebuild_report
from ddpdoctor.recorder.storage.ring_reading import DamagedRingError, read_ring_file
from ddpdoctor.report.blocks import Grid, read_content
from ddpdoctor.report.formats import parse_report, render_json
from tests import kept

JOBS = Path(__file__).parent / "jobs"
SCHEMA = json.loads((Path(ddpdoctor.report.__file__).parent / "schema.json").read_text())
"""Every report of every job is held to it."""
HANG_TIMEOUT_S = 4
PATIENT = ("--hang-timeout", "60")
"""For jobs that do not hang: on a busy machine a rank may stand still for seconds."""
PORTS = range(20_000, 32_000, 2)
"""Below those that the kernel gives to whoever asks for any (ip_local_port_range), so that it gives none of them away
before the job has bound it."""
PORTS_KEPT = 100
_ports: deque[int] = deque()
LIMIT_S = 250


ROWS = Path(__file__).parents[1] / "data" / "scenarios.txt"


def rows_of(section: str) -> list[list[str]]:
    """Return the fields of each row of a section of ``tests/data/scenarios.txt``; those left out are empty."""
    _, _, after = ROWS.read_text().partition(f"==== {section}: ")
    head, *rows = after.partition("\n\n")[0].splitlines()
    names = head.count(" | ") + 1
    return [[*(fields := row.split(" | ")), *[""] * (names - len(fields))] for row in rows]


def numbers(text: str) -> tuple[int, ...]:
    """Return the ranks that a field names."""
    return tuple(map(int, text.split()))


@dataclass(frozen=True)
class Ran:
    """A job that was run: its exit status, its streams, its report and its folder."""

    status: int
    stdout: str
    stderr: str
    report: dict[str, Any]
    folder: Path


def check_finished(ran: Ran) -> None:
    """Hold that all ranks finished, with status 0 unless Gloo aborted one at exit: torchrun then ends with 1.

    That can happen without ddpdoctor too, and, with a device mesh, even after ``destroy_process_group``.
    """
    aborted = any(finding["kind"] == "exit-abort" for finding in ran.report["findings"])
    assert (ran.status, ran.report["job"]["status"]) == (int(aborted), "finished"), ran.stderr


def free_port() -> int:
    """Return a port that is free now, as the next one is, and that no other process of tests gets meanwhile."""
    while True:
        port = random.choice(PORTS)
        if port not in _ports and _claim(port) and _is_free(port) and _is_free(port + 1):
            return port


@functools.cache
def _claims() -> int:
    """Return a file that all processes of tests share: who has locked a byte of it has the port of that number."""
    path = Path(tempfile.gettempdir(), f"ddpdoctor-tests-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _claim(port: int) -> bool:
    """Take a port unless another process has it; of many, the oldest is given back."""
    try:
        fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _ports.append(port)
    if len(_ports) > PORTS_KEPT:
        fcntl.lockf(_claims(), fcntl.LOCK_UN, 1, _ports.popleft())
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what would change a job."""
    drop = ("DDPDOCTOR_", "TORCH_DISTRIBUTED", "PET_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def start(
    script: str | Path, folder: Path, *options: str, ranks: int = 3, args: tuple[str, ...] = (), **env: str
) -> Any:
    """Start ``ddpdoctor wrap`` on a job; ``folder`` becomes the run folder."""
    job = words_of(script) if isinstance(script, str) else (str(script),)
    command = [
        sys.executable, "-m", "ddpdoctor", "wrap", f"--nproc-per-node={ranks}", f"--master-port={free_port()}",
        "--hang-timeout", str(HANG_TIMEOUT_S), "--on-hang", "kill", "--report-dir", str(folder),
        *options, *job, *args,
    ]  # fmt: skip
    return begin(*command, **env)


def begin(*command: object, cwd: Path | None = None, **env: str) -> Any:
    """Start a command in a session of its own, with nothing to read; ``env`` goes beside a clean environment."""
    return subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, cwd=cwd, env=clean_environment(**env), start_new_session=True,
    )  # fmt: skip


def python(*words: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``python *words`` to its end, with nothing to read; ``env`` goes beside a clean environment."""
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        cwd=cwd, env=clean_environment(**env), timeout=LIMIT_S,
    )  # fmt: skip


def doctor(*words: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``ddpdoctor *words`` to its end."""
    return python("-m", "ddpdoctor", *words, cwd=cwd, **env)


def finish(process: Any, folder: Path) -> Ran:
    """Wait for a job and read its report. Whatever still lives of it in the end is killed."""
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        kill_job(folder)
    print(stdout, stderr)  # pytest shows it where the test fails
    path = folder / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    if report:
        hold_to_report(report)
        hold_to_second_judgment(folder, report)
    return Ran(process.returncode, stdout, stderr, report, folder)


def hold_to_report(report: dict[str, Any]) -> None:
    """Fail where a report is not of the form that all have, or a picture of it crashed."""
    hold_to_schema(report)
    assert not [check for check in report["checks"] if check["id"] == "pictures"]  # it is there if it crashed


def hold_to_second_judgment(folder: Path, report: dict[str, Any]) -> None:
    """Fail where the run folder alone says something else of the job than the report, which may be removed."""
    if (folder / "run.json").exists():  # a folder without room has the report alone
        again = json.loads(render_json(rebuild_report(folder)))
        assert _reported(again) == _reported(report)


def _reported(report: dict[str, Any]) -> tuple[Any, ...]:
    verdict = report["verdict"] or {"code": None, "ranks": None}
    return report["job"], report["started_at"], report["ended_at"], verdict["code"], verdict["ranks"]


def hold_to_schema(report: dict[str, Any]) -> None:
    """Fail where a report is not of the form that all have."""
    _validator().validate(report)


@functools.cache
def _validator() -> Any:
    import jsonschema  # a machine that is lent for its GPU lacks it

    kind = jsonschema.validators.validator_for(SCHEMA)
    kind.check_schema(SCHEMA)
    return kind(SCHEMA)


def grids_of(report: dict[str, Any]) -> dict[str, Grid]:
    """Return the grids that a document draws of a report, by their titles."""
    pictures = read_content(parse_report(json.dumps(report))).pictures
    return {block.title: block for block in pictures if isinstance(block, Grid)}


def cell_of(grid: Grid, row: str, column: str) -> str:
    """Return the text of the cell in the row and the column of these names."""
    return grid.cells[grid.rows.index(row)][grid.columns.index(column)].text


def run(script: str | Path, folder: Path, *options: str, ranks: int = 3, args: tuple[str, ...] = (), **env: str) -> Ran:
    """Run a job to its end, or take what was kept of its run: see ``tests/kept.py``."""
    job = kept.Job(str(script), options, ranks, args, env)
    if (found := kept.take(job, folder)) is not None:
        status, text, report = found
        hold_to_report(report)
        return Ran(status, "", text, report, folder)
    ran = finish(start(script, folder, *options, ranks=ranks, args=args, **env), folder)
    kept.offer(job, folder, ran.status)
    return ran


def job_pids(folder: Path) -> list[int]:
    """Return the processes of a job that live: those whose environment names its folder."""
    return pids_with(f"DDPDOCTOR_RUN={folder.resolve()}")


def pids_with(variable: str) -> list[int]:
    """Return the processes that live and have ``NAME=value`` in their environment."""
    mark = variable.encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            carries = entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0")
            if carries and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def kill_job(folder: Path) -> None:
    """Kill what is left of a job, by the processes that carry its folder's name."""
    for pid in job_pids(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition: Any, limit_s: float = 200) -> bool:
    """Wait until a condition holds; False when it does not in time."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.05)
    return False


def has_called(folder: Path, op: str) -> bool:
    """Return whether any rank of a job has called an operation."""
    for path in (folder / "rings").glob("*.ring"):
        with contextlib.suppress(DamagedRingError):  # it is just being made
            if any(op in text for text in read_ring_file(path).strings.values()):
                return True
    return False


def words_of(job: str, jobs: Path = JOBS) -> tuple[str, ...]:
    """Return the command line of a job of ``jobs/``: a script, or one function of a script with several jobs."""
    script = jobs / f"{job}.py"
    if script.exists():
        return (str(script),)
    (script,) = (path for path in jobs.glob("*.py") if f"\ndef {job}(" in path.read_text())
    return str(script), job


def marked_lines(job: str, mark: str = "FAULT", jobs: Path = JOBS) -> list[int]:
    """Return the lines of a job that carry its marker. A function that it calls carries the job's name too."""
    script, *function = words_of(job, jobs)
    text = Path(script).read_text()
    (place,) = [node for node in ast.parse(text).body if getattr(node, "name", "") in function] or [None]
    first, last = (place.lineno, place.end_lineno or 0) if isinstance(place, ast.FunctionDef) else (1, len(text))
    return [
        number for number, line in enumerate(text.splitlines(), start=1)
        if line.endswith(f"# {mark} {job}") or (line.endswith(f"# {mark}") and first <= number <= last)
    ]  # fmt: skip
