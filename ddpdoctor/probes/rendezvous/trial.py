"""Makes a real start in a forked process: init_process_group with Gloo, and an all-reduce."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.store import wait_until
from ddpdoctor.model.errors import first_line

if TYPE_CHECKING:
    from collections.abc import Callable

ELEMENTS = 2**18
"""The size of the larger all-reduce: 1 MiB of float32, many packets on any path."""
PR_SET_PDEATHSIG = 1
"""From prctl(2)."""
GRACE_S = 1.0
"""Our choice: how much longer than its own limit the process may take to report what happened."""


def fork_trial() -> StartProcess:
    """Fork a process that waits for the command to start. Call this before any thread exists."""
    there, here = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(there[0])
        os.close(here[1])
        return StartProcess(pid, there[1], here[0])
    os.close(there[1])
    os.close(here[0])
    _end_with_parent()
    _wait_and_run(there[0], here[1])
    os._exit(0)


class StartProcess:
    """The parent's handle of the process that makes the start."""

    def __init__(self, pid: int, write_to: int, read_from: int) -> None:
        """``write_to`` and ``read_from`` are the descriptors for writing to the process and reading from it."""
        self._pid, self._write_to, self._read_from = pid, write_to, read_from

    def run(self, **job: Any) -> dict[str, Any]:
        """Make the start, and return ``stage``, ``error`` ("" means success) and ``duration_s``.

        ``job`` has rank, world_size, host, port, prefix and limit_s. The process is killed if it does not end in time.
        """
        began = time.monotonic()
        os.write(self._write_to, json.dumps(job).encode() + b"\n")
        os.close(self._write_to)
        limit_s = float(job["limit_s"])
        stages, hung_up = self._listen(began + limit_s + GRACE_S)
        last = stages[-1] if stages else {"stage": "store"}
        error = "" if last.get("done") else last.get("error") or self._end(limit_s, hung_up=hung_up)
        return {"stage": last["stage"], "error": error, "duration_s": time.monotonic() - began}

    def _listen(self, deadline: float) -> tuple[list[dict[str, Any]], bool]:
        """Return the stages that it reports until it hangs up or the time is up, and whether it has hung up."""
        text, hung_up = b"", False
        while not hung_up and (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self._read_from], [], [], left_s)[0]:
                break
            part = os.read(self._read_from, 65536)
            hung_up = not part
            text += part
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")], hung_up

    def _end(self, limit_s: float, *, hung_up: bool) -> str:
        """Return how the process ended. Kill it if it has not hung up; if it has, it is about to end."""
        if hung_up:
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            return f"the process {how}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return f"it did not end within {limit_s:g} s"


def _end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, because it may hang in torch by then."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait_and_run(orders: int, write_to: int) -> None:
    with os.fdopen(orders) as stream:
        line = stream.readline()
    if not line:
        return
    with os.fdopen(write_to, "w", buffering=1) as out:

        def say(**what: Any) -> None:
            out.write(json.dumps(what) + "\n")

        _Start(json.loads(line), say).run()


class _Start:
    """Runs the stages of a start, and reports each before it begins."""

    def __init__(self, job: dict[str, Any], say: Any) -> None:
        self._job, self._say = job, say
        self._limit = timedelta(seconds=float(job["limit_s"]))
        self._stage = ""
        self._joined: Any = None
        self._sums: list[tuple[float, float]] = []

    def run(self) -> None:
        try:
            for name, part in self._parts().items():
                self._stage = name
                self._say(stage=name)
                part()
        except Exception as error:  # noqa: BLE001 - whatever torch raises is the result of the start
            self._say(stage=self._stage, error=first_line(error))
        else:
            self._say(stage=self._stage, done=True)

    def _parts(self) -> dict[str, Callable[[], None]]:
        return {
            "store": self._join,
            "init_process_group": self._init_process_group,
            "all_reduce": self._all_reduce,
            "result": self._compare,
        }

    def _join(self) -> None:
        from torch.distributed import PrefixStore, TCPStore

        store = TCPStore(
            self._job["host"],
            int(self._job["port"]),
            is_master=False,
            wait_for_workers=False,
            timeout=self._limit,
        )
        self._joined = PrefixStore(str(self._job["prefix"]), store)

    def _init_process_group(self) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", store=self._joined, rank=int(self._job["rank"]), world_size=int(self._job["world_size"]),
            timeout=self._limit,
        )  # fmt: skip

    def _all_reduce(self) -> None:
        import torch
        import torch.distributed as dist

        for elements in (1, ELEMENTS):
            values = torch.full((elements,), float(self._job["rank"] + 1))
            dist.all_reduce(values)
            self._sums.append((float(values.min()), float(values.max())))

    def _compare(self) -> None:
        world_size = int(self._job["world_size"])
        wanted = world_size * (world_size + 1) / 2
        if any(sums != (wanted, wanted) for sums in self._sums):
            raise ValueError(f"the sum of 1 to {world_size} came out as {self._sums}")
        self._see_off(world_size)

    def _see_off(self, world_size: int) -> None:
        """Wait for the other ranks. A rank that leaves early breaks the connections of those that are not done."""
        self._joined.add("left", 1)
        wait_until(lambda: int(self._joined.add("left", 0)) >= world_size, GRACE_S, 0.01)
