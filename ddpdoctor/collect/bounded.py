"""Runs what may hang, each with a time limit: calls in threads, which are left behind, and child processes."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpdoctor.collect.proc import safe_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Value = TypeVar("Value")
NOT_FOR_CHILDREN = frozenset({"DDPDOCTOR_RUN"})  # loads the recorder of ``wrap``
TORCH_PROBE = "ddpdoctor.probes.torch_facts"
# Makes a process end when its parent does, even by SIGKILL. ``preexec_fn`` could do it, but not where threads run.
_WITH_PARENT = """
import ctypes, os, sys
_, parent, *sys.argv = sys.argv
try:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
except AttributeError:  # not Linux
    pass
if os.getppid() != int(parent):  # it ended before that
    os._exit(0)
"""
# Then runs a module as ``-m`` does.
_MODULE = _WITH_PARENT + 'import runpy; runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'
_PROGRAM = _WITH_PARENT + "os.execv(sys.argv[0], sys.argv)"  # then becomes another program, which keeps that
ChildProcess = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[Value]):
    """How a call ended; ``value`` is set if it returned, and ``value`` and ``error`` are None if it timed out."""

    value: Value | None = None
    error: OSError | None = None
    timed_out: bool = False
    duration_s: float


def ask_one(call: Callable[[], Value], limit_s: float) -> Reply[Value]:
    """Make one call, as ``ask_side_by_side`` does."""
    return ask_side_by_side({"call": call}, limit_s)["call"]


def ask_side_by_side(
    calls: Mapping[str, Callable[[], Value]], limit_s: float | Mapping[str, float]
) -> dict[str, Reply[Value]]:
    """Make all calls in parallel, and return their replies within the limit, which may differ by call.

    Each has a daemon thread: a getaddrinfo that waits for a dead server must not keep the process alive. Errors other
    than OSError are raised here.
    """
    replies: dict[str, Reply[Value]] = {}
    defects: dict[str, Exception] = {}

    def answer(name: str, call: Callable[[], Value]) -> None:
        asked_at, value, error = time.monotonic(), None, None
        try:
            value = call()
        except OSError as failed:
            error = failed
        except Exception as defect:  # noqa: BLE001 - raised again below
            defects[name] = defect
        replies[name] = Reply(value=value, error=error, duration_s=time.monotonic() - asked_at)

    started = time.monotonic()
    threads = [threading.Thread(target=answer, args=(name, call), daemon=True) for name, call in calls.items()]
    for thread in threads:
        thread.start()
    found = {}
    for name, thread in zip(calls, threads, strict=True):
        thread.join(max(0.0, started + (limit_s[name] if isinstance(limit_s, Mapping) else limit_s) - time.monotonic()))
        found[name] = replies.get(name) or Reply(timed_out=True, duration_s=time.monotonic() - started)
        if name in defects:
            raise defects[name]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """How a child ended, and what it wrote."""

    out: str
    err: str
    status: int | None  # None if it did not end in time and was killed, or was left behind in an uninterruptible sleep

    @property
    def last_error(self) -> str:
        """Return the last line of stderr, or the status if stderr is empty."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status}"

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return the JSON objects in its output, which has other lines too."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{") and line.endswith("}")]


def start_module(module: Sequence[str], env: Mapping[str, str], *, flags: Sequence[str] = ()) -> ChildProcess:
    """Start a ddpdoctor module with its arguments, without the variables that load the recorder; raises OSError."""
    return start_program(
        [sys.executable, *safe_flags(), *flags, "-c", _MODULE, str(os.getpid()), *module],
        {name: value for name, value in env.items() if name not in NOT_FOR_CHILDREN},
    )


def start_program(
    command: Sequence[str], env: Mapping[str, str] | None = None, *, is_bound: bool = False
) -> ChildProcess:
    """Start a program without input, and capture its output; raises OSError.

    ``wait_for_program`` kills it at its time limit. If ddpdoctor exits before that, the program is killed at exit, and
    also if ddpdoctor is killed if it ``is_bound``, which needs its path.
    """
    if is_bound:
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env)
    atexit.register(process.kill)
    return process


def wait_for_program(process: ChildProcess, limit_s: float) -> ChildEnd:
    """Wait until it ends, at most for ``limit_s``, and return what it wrote by then.

    Unlike ``subprocess.run``, this does not wait for a killed process, which may be in an uninterruptible sleep.
    """
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        process.kill()
        return ChildEnd(out=_decoded(late.stdout), err=_decoded(late.stderr), status=None)
    finally:
        atexit.unregister(process.kill)
    return ChildEnd(out=_decoded(out), err=_decoded(err), status=process.returncode)


def run_child(module: str, arguments: Sequence[str], env: Mapping[str, str], limit_s: float) -> ChildEnd:
    """Run ``python -m module`` until it ends, at most for ``limit_s``; raises OSError."""
    return wait_for_program(start_module((module, *arguments), env), limit_s)


def _decoded(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
