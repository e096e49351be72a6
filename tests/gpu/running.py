"""Runs the jobs of these tests side by side: each in processes of its own, with a limit, and saved as soon as it ends.

A job whose verdict does not depend on speed runs beside others. The rest run one by one after them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpdoctor.collect.proc import read_command
from tests.scenarios.running import clean_environment, free_port, pids_with

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "jobs"
DRY_VARIABLE = "GPU_TESTS_DRY_RUN"
"""Set to 1, the jobs run on the CPU over Gloo. Only ``--gpu-dry-run`` sets it."""
LEAST_S = 20.0
"""A job that has less time left is not begun: CUDA and NCCL take half of it to start."""
HANG_TIMEOUT_S = 15
"""CUDA and NCCL need longer to start than the other tests wait for a rank."""
NOT_REACHED, CUT_OFF = "not reached", "cut off"
"""Why a job has no exit status: the time for all jobs was over before it began, or before its own limit."""
GRACE_S = 8.0
"""How long a job that ran past its limit may take to save what it saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command.

    In its words, {folder} stands for the job's folder, {port} for a free port, {backend} for NCCL's name and {hang_s}
    for the hang timeout. In its variables, {folder} does too.
    """

    name: str
    command: tuple[str, ...]
    """What follows ``python``."""
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 100.0
    alone: bool = False
    """Whether it measures time, so that no other job may run beside it."""
    cuda_only: bool = False
    """Whether a dry run shows nothing of it."""
    sends: int = 0
    """The signal for the process whose pid the job writes to {folder}/held; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A job that ended, was stopped at its limit, or was never begun."""

    job: Job
    folder: Path
    status: int | None
    """The exit status. None: it ran past its limit, or was never begun."""
    began_s: float
    """After the first job of all."""
    took_s: float
    problem: str = ""
    """Why there is no exit status: NOT_REACHED, CUT_OFF, or that it ran past its own limit."""

    @property
    def stdout(self) -> str:
        """What it wrote."""
        return _text(self.folder / "stdout")

    @property
    def stderr(self) -> str:
        """What it wrote there."""
        return _text(self.folder / "stderr")

    @property
    def left(self) -> str:
        """The commands of processes that outlived it."""
        return _text(self.folder / "left")

    @property
    def report(self) -> dict[str, Any]:
        """The report of ``wrap``, or the one on stdout; empty where there is none."""
        return _parse(_text(self.folder / "run" / "report.json") or self.stdout)

    @property
    def result(self) -> dict[str, Any]:
        """What the job's script left; empty where it left nothing."""
        return _parse(_text(self.folder / "result.json"))


class Runner:
    """Runs jobs until the time is over."""

    def __init__(
        self,
        jobs: Sequence[Job],
        root: Path,
        *,
        width: int,
        limit_s: float,
        ended: Callable[[Done], None],
        dry: bool,
        least_s: float = LEAST_S,
        python: str = sys.executable,
        hang_s: int = HANG_TIMEOUT_S,
    ) -> None:
        """``width`` jobs run at a time. ``ended`` is called for each, from any thread. Nothing begins yet."""
        self._jobs, self._root, self._width, self._ended, self._dry = jobs, root, width, ended, dry
        self._least_s, self._python, self._hang_s = least_s, python, hang_s
        self._began = time.monotonic()
        self._deadline = self._began + limit_s
        self._futures: dict[str, Future[Done]] = {}
        self._running: set[Any] = set()

    def __call__(self, name: str) -> Done:
        """Return a job once it has ended. The first call begins all jobs, in their order."""
        if not self._futures:
            self._begin()
        return self._futures[name].result()

    def close(self) -> None:
        """Begin no more jobs, and stop those that run."""
        self._deadline = time.monotonic()
        for process in list(self._running):
            process.kill()

    def _begin(self) -> None:
        beside = ThreadPoolExecutor(self._width)
        for job in self._jobs:
            if not job.alone:
                self._futures[job.name] = beside.submit(self._run, job)
        others = list(self._futures.values())
        alone = ThreadPoolExecutor(1)
        for job in self._jobs:
            if job.alone:
                self._futures[job.name] = alone.submit(self._run_after, others, job)

    def _run_after(self, others: list[Future[Done]], job: Job) -> Done:
        wait(others, timeout=max(0.0, self._deadline - time.monotonic()))
        return self._run(job)

    def _run(self, job: Job) -> Done:
        folder = self._root / job.name
        folder.mkdir(parents=True)
        began = time.monotonic()
        left_s = self._deadline - began
        if left_s < self._least_s:
            status, problem = None, NOT_REACHED
        else:
            status, problem = self._run_within(job, folder, min(job.limit_s, left_s - GRACE_S))
            if problem and left_s - GRACE_S < job.limit_s:
                problem = CUT_OFF
        done = Done(
            job=job, folder=folder, status=status, problem=problem, began_s=began - self._began,
            took_s=time.monotonic() - began,
        )  # fmt: skip
        self._ended(done)
        return done

    def _run_within(self, job: Job, folder: Path, limit_s: float) -> tuple[int | None, str]:
        """Return the exit status, or None and why there is none."""
        mark = f"GPU_TESTS_JOB={folder}"
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                self._command(job, folder), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=folder,
                env=self._environment(job, folder), start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
            try:
                return _wait_for(process, folder / "held", job.sends, limit_s), ""
            except subprocess.TimeoutExpired:
                _stop(process)
                return None, f"stopped at its limit of {limit_s:.0f} s"
            finally:
                (folder / "left").write_text("\n".join(read_command(pid) for pid in pids_with(mark)))
                _kill_marked(mark)
                process.wait()
                self._running.discard(process)

    def _command(self, job: Job, folder: Path) -> list[str]:
        known = {"folder": str(folder), "port": str(free_port()), "backend": "gloo" if self._dry else "nccl"}
        known["hang_s"] = str(self._hang_s)
        return [self._python, *(word.format_map(known) for word in job.command)]

    def _environment(self, job: Job, folder: Path) -> dict[str, str]:
        own = {name: value.format(folder=folder) for name, value in job.env.items()}
        search = os.pathsep.join(filter(None, (own.pop("PYTHONPATH", ""), str(ROOT))))
        dry = {DRY_VARIABLE: "1"} if self._dry else {}
        return clean_environment(PYTHONPATH=search, GPU_TESTS_JOB=str(folder), **dry, **own)


def _wait_for(process: Any, held: Path, number: int, limit_s: float) -> int:
    """Return the exit status. Sends a rank a signal as soon as the file with its pid is there."""
    limit = time.monotonic() + limit_s
    while number and process.poll() is None and time.monotonic() < limit:
        if held.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(held.read_text()), number)
            break
        time.sleep(0.05)
    return int(process.wait(max(0.0, limit - time.monotonic())))


def _stop(process: Any) -> None:
    """Let a job that takes too long save what it saw."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def _kill_marked(mark: str) -> None:
    """Kill what is left of a job and wait until it is gone: a killed process lives on for a moment."""
    limit = time.monotonic() + GRACE_S
    while (pids := pids_with(mark)) and time.monotonic() < limit:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _parse(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
