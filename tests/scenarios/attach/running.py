"""Starts jobs that ``attach`` looks at, without ``wrap``, and ends them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpdoctor.attach.look import Attached, attach
from ddpdoctor.collect.proc import descendants, read_processes, read_status
from ddpdoctor.model.attached import RankLook
from ddpdoctor.model.codec import decode
from tests.scenarios.running import JOBS, clean_environment, free_port, python, wait_for

SCRIPT = JOBS / "attached.py"
ROOT = Path(__file__).parents[3]
AS_NOBODY = """
import pathlib
from ddpdoctor.attach import look
from ddpdoctor.model.errors import UserError
import ipaddress, os, pwd, ddpdoctor.model.words, ddpdoctor.model.launch
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    print(look.attach(pathlib.Path({output!r}), {pid}, gap_s={gap_s}).folder)
except UserError as error:
    print(error.status, error.message)
    print(error.help)
"""
GAP_S = 0.3
"""Between two looks. The jobs of these tests hang for good, or take hundreds of steps in that time."""


@dataclass
class Job:
    """A job that runs."""

    folder: Path
    processes: list[Any]
    port: int
    released: bool = False
    pids: list[int] = field(default_factory=list)

    def attach(self, output: Path, **options: Any) -> Attached:
        """Look at this job and at no other of this machine."""
        return attach(output, **{"pid": self.pids[0], "gap_s": GAP_S, **options})

    def attach_as_nobody(self, output: Path) -> str:
        """Look at this job from a Python that becomes another user. Return the folder, or what is wrong."""
        code = AS_NOBODY.format(pid=self.pids[0], output=str(output), gap_s=GAP_S)
        done = python("-c", code, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def release(self) -> None:
        """Let the rank at fault go on."""
        (self.folder / "end").touch()

        def opened() -> bool:
            try:
                os.close(os.open(self.folder / "release", os.O_WRONLY | os.O_NONBLOCK))
            except OSError:  # nobody waits yet, or nobody ever will
                return self.has_ended()
            return True

        assert wait_for(opened)

    def has_ended(self) -> bool:
        """Return whether all processes of it have ended."""
        return all(process.poll() is not None for process in self.processes)

    def ends_well(self) -> bool:
        """Let it go on, and return whether it ends with status 0."""
        self.release()
        return all(process.wait(200) == 0 for process in self.processes)


@contextlib.contextmanager
def running(
    mode: str, folder: Path, *args: str, by_hand: bool = False, settle: bool = True, **env: str
) -> Iterator[Job]:
    """Run a job of two ranks; it hangs already, or trains, when this begins."""
    port = free_port()
    words = [str(SCRIPT), mode, str(folder), *args]
    with started(folder, port, lambda: _start(words, port, env, by_hand=by_hand), settle=settle) as job:
        yield job


@contextlib.contextmanager
def started(
    folder: Path, port: int, start: Callable[[], list[Any]], *, settle: bool = True, inside: bool = False
) -> Iterator[Job]:
    """Start the processes of a job, and give it when its two ranks have come to their places."""
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "release")
    job = Job(folder=folder, processes=start(), port=port)
    try:
        assert wait_for(lambda: job.has_ended() or all((folder / f"at_{rank}").exists() for rank in range(2)))
        assert not job.has_ended()
        assert wait_for(lambda: all((folder / f"at_{rank}").read_text() for rank in range(2)))
        told = [int((folder / f"at_{rank}").read_text()) for rank in range(2)]
        job.pids = [_from_outside(pid, job) for pid in told] if inside else told
        if settle:
            assert wait_for(lambda: all(map(sleeps, job.pids)))
        yield job
    finally:
        _kill(job)


def _start(words: list[str], port: int, env: dict[str, str], *, by_hand: bool) -> list[Any]:
    def start(command: list[str], **more: str) -> Any:
        return subprocess.Popen(
            [sys.executable, *command], env=clean_environment(**env, **more), stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    if words[1] == "spawn":
        return [start([*words, str(port)])]
    if not by_hand:
        return [start(["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", *words])]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start(words, RANK=str(rank), TORCH_WORKER_SERVER_SOCKET=f"{words[2]}/server_{rank}.sock", **shared)
        for rank in range(2)
    ]


def _from_outside(pid: int, job: Job) -> int:
    """Return our pid of a process that has another one in its own namespace."""
    for one in descendants(job.processes[0].pid, read_processes()):
        numbers = read_status(one.pid).get("NSpid", "").split()
        if len(numbers) > 1 and numbers[-1] == str(pid):
            return one.pid
    raise AssertionError(f"no process is {pid} inside")


def sleeps(pid: int) -> bool:
    """Return whether the main thread of a process does not run for a while, and does not wait for a core either."""
    before = _switches(pid)
    time.sleep(0.1)
    return _switches(pid) == before and "(running)" not in before[0]


def _switches(pid: int) -> list[str]:
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    return [line for line in status if line.startswith(("State", "voluntary"))]


def _kill(job: Job) -> None:
    for process in job.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for pid in job.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in job.processes:
        process.wait()


def looks(seen: Attached, number: int) -> list[RankLook]:
    """Return what is saved of one look at each rank, in their order."""
    paths = sorted(seen.folder.glob(f"look_{number}/rank_*.json"))
    return [decode(RankLook, json.loads(path.read_text())) for path in paths]


def main_lines(look: RankLook) -> list[tuple[str, int]]:
    """Return function and line of the main thread's frames, innermost first."""
    (main,) = [thread for thread in look.stacks if thread["thread_name"] == "MainThread"]
    return [(frame["name"], frame["line"]) for frame in main["frames"]]


def marked(mark: str) -> int:
    """Return the line of the job that carries a mark."""
    (number,) = [n for n, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith(f"# {mark}")]
    return number
