"""Runs what may hang, each with a time limit: calls in threads, which are left behind, and child processes.

Parts of ddpdoctor run as child processes because they may hang in the kernel, where no signal ends them.
"""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[Value]):
    """How a call ended; ``value`` is set if it returned, and ``value`` and ``error`` are None if it timed out."""

    value: Value | None
    error: OSError | None
    timed_out: bool
    duration_s: float


def ask_side_by_side(
    calls: Mapping[str, Callable[[], Value]], limit_s: float | Mapping[str, float]
) -> dict[str, Reply[Value]]:
    """Make all calls at once, and return their replies within the limit, which may differ by call.

    Errors other than OSError are raised here.
    """
    running = {name: _Call(name, call) for name, call in calls.items()}
    started = time.monotonic()
    for thread in running.values():
        thread.start()
    limits = limit_s if isinstance(limit_s, Mapping) else dict.fromkeys(calls, limit_s)
    return {name: thread.reply(started + limits[name]) for name, thread in running.items()}


class _Call(threading.Thread, Generic[Value]):
    """One call, in a daemon thread: a getaddrinfo that waits for a dead server must not keep the process alive."""

    def __init__(self, name: str, call: Callable[[], Value]) -> None:
        super().__init__(name=f"ddpdoctor-{name}", daemon=True)
        self._call = call
        self._value: Value | None = None
        self._error: OSError | None = None
        self._defect: BaseException | None = None
        self._asked_at = time.monotonic()
        self._ended: float | None = None

    def run(self) -> None:
        self._asked_at = time.monotonic()
        try:
            self._value = self._call()
        except OSError as error:
            self._error = error
        except Exception as defect:  # noqa: BLE001 - reply() raises it again
            self._defect = defect
        self._ended = time.monotonic()

    def reply(self, deadline: float) -> Reply[Value]:
        self.join(max(0.0, deadline - time.monotonic()))
        ended = self._ended
        if ended is None:
            return Reply(value=None, error=None, timed_out=True, duration_s=time.monotonic() - self._asked_at)
        if self._defect is not None:
            raise self._defect
        return Reply(value=self._value, error=self._error, timed_out=False, duration_s=ended - self._asked_at)


# The variables that load the recorder of ``wrap``. Our own programs do not need it.
NOT_FOR_CHILDREN = frozenset({"DDPDOCTOR_RUN"})

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


def safe_flags() -> list[str]:
    """Return the flags that keep our child Pythons from importing from the current folder.

    That may be any user's, such as /tmp, and with ``-m`` and ``-c`` Python looks there first. If this process has the
    folder on its own path, as after ``python -m ddpdoctor``, its children have it too. Before Python 3.11 there is no
    such flag.
    """
    try:
        has_it = bool({"", str(Path.cwd())}.intersection(sys.path))
    except FileNotFoundError:  # the folder was removed
        has_it = False
    return [] if has_it or sys.version_info < (3, 11) else ["-P"]


ChildProcess = subprocess.Popen[bytes]


def start_module(module: Sequence[str], env: Mapping[str, str], *, flags: Sequence[str] = ()) -> ChildProcess:
    """Start a ddpdoctor module with its arguments, without the variables that load the recorder; raises OSError."""
    return start_program(
        [sys.executable, *safe_flags(), *flags, "-c", _MODULE, str(os.getpid()), *module],
        {name: value for name, value in env.items() if name not in NOT_FOR_CHILDREN},
    )


def start_program(command: Sequence[str], env: Mapping[str, str] | None = None) -> ChildProcess:
    """Start a program without input, and capture its output; raises OSError.

    ``wait_for_program`` kills it at its time limit. If ddpdoctor exits before that, the program is killed at exit.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    atexit.register(process.kill)
    return process


def start_bound_program(command: Sequence[str]) -> ChildProcess:
    """Start a program, given by its path, that does not outlive this process even if that is killed; raises OSError."""
    return start_program([sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command])


def wait_for_program(process: ChildProcess, limit_s: float) -> ChildEnd:
    """Wait until it ends, at most for ``limit_s``, and return what it wrote by then.

    Unlike ``subprocess.run``, this does not wait for a killed process, which may be in an uninterruptible sleep.
    """
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        process.kill()
        return ChildEnd(out=_text(late.stdout), err=_text(late.stderr), status=None)
    finally:
        atexit.unregister(process.kill)
    return ChildEnd(out=_text(out), err=_text(err), status=process.returncode)


def run_child(module: str, arguments: Sequence[str], env: Mapping[str, str], limit_s: float) -> ChildEnd:
    """Run ``python -m module`` until it ends, at most for ``limit_s``; raises OSError."""
    return wait_for_program(start_module((module, *arguments), env), limit_s)


def start_torch_child(env: Mapping[str, str]) -> ChildProcess:
    """Start a Python that imports torch; callers do so before their own heavy imports. Raises OSError."""
    return start_module((TORCH_PROBE,), env)


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
