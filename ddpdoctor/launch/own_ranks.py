"""Starts a verb's ranks here, and serves their store: the others can still communicate when one has died."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.gpus import count_gpus
from ddpdoctor.collect.launch import OWN_VARIABLE
from ddpdoctor.collect.proc import read_process, safe_flags
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.wire import VARIABLE as TOKEN_VARIABLE
from ddpdoctor.exchange.wire import token_bytes
from ddpdoctor.launch.command_line import RANKS_WITHOUT_GPU, choose_nproc
from ddpdoctor.model.errors import ExitStatus, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LOOK_EVERY_S = 0.05
# Our choice: how long the others may take to notice a failed rank and report it, before they are ended.
REPORT_GRACE_S = 60.0
# The exit statuses of a rank that has reported why it ends.
REPORTED = {ExitStatus.FOUND, ExitStatus.WRONG_USE, ExitStatus.DEFECT, ExitStatus.INCONCLUSIVE}
END_GRACE_S = 5.0  # our choice: the time between SIGTERM and SIGKILL
# Our choice: how long a killed rank may take to end. Freeing the memory of a large process takes seconds.
KILLED_LIMIT_S = 10.0
PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def choose_ranks(env: Mapping[str, str]) -> tuple[int, str]:
    """Return how many ranks to start if the user did not choose, and the option that would choose the same."""
    cores = len(os.sched_getaffinity(0))
    return choose_nproc(source=None, gpus=count_gpus(env), without_gpu=min(cores, RANKS_WITHOUT_GPU))


def run_ranks(arguments: Sequence[str], count: int, env: Mapping[str, str]) -> int:
    """Run ``python -m ddpdoctor`` with ``arguments`` in ``count`` ranks; return the status to exit with.

    Streams are inherited. A second signal ends all ranks at once. Raises ``UserError`` if nobody can report a failure.
    """
    token = env.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    server = Server(0, token_bytes(token), one_host=True)
    ranks = _Ranks()
    command = [sys.executable, *safe_flags(), "-m", "ddpdoctor", *arguments]
    try:
        with _passing_on(ranks):
            for rank in range(count):
                variables = {
                    "OMP_NUM_THREADS": "1", **env,  # as torchrun does, unless it is set
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                    "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
                    OWN_VARIABLE: str(os.getpid()), TOKEN_VARIABLE: token,
                }  # fmt: skip
                # In its own session, or Ctrl-C would reach it twice: from the terminal and from this process.
                ranks.running.append(subprocess.Popen(command, env=variables, start_new_session=True))
            _wait(ranks)
            lost = "" if ranks.signals else describe_lost([process.poll() for process in ranks.running])
    finally:
        _end(ranks)
        server.close()
    if lost:
        raise UserError(
            f"{lost}, and rank 0 got no answer from it",
            help="Read its own messages, if there are any. `dmesg` shows whether the kernel killed it for memory.",
            status=ExitStatus.INCONCLUSIVE,
        )
    statuses = [process.returncode for process in ranks.running]
    return choose_status([-signal.SIGKILL if status is None else status for status in statuses])


def choose_status(statuses: Sequence[int]) -> int:
    """Return rank 0's exit status, or if a signal ended rank 0, the first failure status of another rank."""
    verdicts = [status for status in statuses if status >= 0]
    if statuses[0] < 0:
        verdicts = [status for status in verdicts if status > 0]
    return verdicts[0] if verdicts else 128 - statuses[0]


def describe_lost(statuses: Sequence[int | None]) -> str:
    """Describe the failed ranks that rank 0 (still running: None) waits for, or "" if a rank has said why it ends."""
    if statuses[0] is not None or any(status in REPORTED for status in statuses):
        return ""
    endings = (
        f"rank {rank} was killed by {signal.Signals(-status).name}" if status < 0
        else f"rank {rank} ended with status {status}"
        for rank, status in enumerate(statuses) if status
    )  # fmt: skip
    return " and ".join(endings)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM to this rank when its parent process is gone, for example after a SIGKILL."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # not Linux
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before prctl
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(slots=True)
class _Ranks:
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    signals: int = 0

    def living(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.running if process.poll() is None]

    def send(self, number: int) -> None:
        for process in self.living():
            with suppress(ProcessLookupError):
                process.send_signal(number)


@contextmanager
def _passing_on(ranks: _Ranks) -> Iterator[None]:
    def pass_on(number: int, _frame: Any) -> None:
        ranks.signals += 1
        ranks.send(number if ranks.signals == 1 else signal.SIGKILL)

    former = {number: signal.signal(number, pass_on) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _wait(ranks: _Ranks) -> None:
    deadline: float | None = None
    while ranks.living():
        if deadline is None and (ranks.signals or any(process.poll() for process in ranks.running)):
            deadline = time.monotonic() + REPORT_GRACE_S
        if deadline is not None:
            seen = [read_process(process.pid) for process in ranks.living()]
            # A rank that a signal or a debugger has stopped cannot end by itself.
            if time.monotonic() > deadline or all(
                process is not None and process.state in {"T", "t"} for process in seen
            ):
                return
        time.sleep(LOOK_EVERY_S)


def _end(ranks: _Ranks) -> None:
    ranks.send(signal.SIGTERM)
    ranks.send(signal.SIGCONT)  # a stopped rank handles SIGTERM only after it continues
    deadline = time.monotonic() + END_GRACE_S
    while ranks.living() and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    ranks.send(signal.SIGKILL)
    for process in ranks.running:
        with suppress(subprocess.TimeoutExpired):  # no signal reaches a rank that sleeps in the driver of a dead GPU
            process.wait(KILLED_LIMIT_S)
