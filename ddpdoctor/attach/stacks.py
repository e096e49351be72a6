"""Has py-spy read the Python stacks of a process. It reads the process's memory and never stops it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ddpdoctor.collect.bounded import start_program, wait_for_program
from ddpdoctor.collect.system import read_text
from ddpdoctor.model.attached import Refusal
from ddpdoctor.recorder.storage.secrets import hide_in_text

SOURCE = "py-spy"
LIMIT_S = 5.0
"""Our choice: a rank takes 0.12 s, and more where many are read at once on few cores."""
TRIES = 3
"""Our choice: memory that changes while it is read can make no sense; the next reading mostly does."""
INSTALL = "pip install 'ddpdoctor[attach]'"
SUDO = 'sudo -E env "PATH=$PATH" ddpdoctor attach'
"""sudo has a PATH of its own, on which a virtual environment is not."""
DEBUG_POD = "kubectl debug POD -it --profile=sysadmin --target=CONTAINER --image=IMAGE"
_REFUSED = ("permission denied", "operation not permitted", "eperm")
_ITS_REMEDY = ": Try running again with"
"""py-spy says sudo here, which helps only some of those who read it."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def read_stacks(pid: int) -> tuple[Any, Refusal | None]:
    """Return py-spy's JSON, a list of threads, or None and why there is none."""
    program = find_py_spy()
    if program is None:
        return None, Refusal(source=SOURCE, reason="py-spy is not installed", remedy=INSTALL)
    error, threads = "", None
    for _ in range(TRIES):
        end = wait_for_program(
            start_program([program, "dump", "--nonblocking", "--json", "--pid", str(pid)], dict(os.environ)), LIMIT_S
        )
        if end.status is None:
            return None, Refusal(source=SOURCE, reason=f"py-spy did not end within {LIMIT_S:.0f} s")
        threads = _parse(end.out) if end.status == 0 else threads
        if main_frames(threads) is not None:
            return threads, None
        error = " ".join(end.err.split()) or f"py-spy ended with status {end.status}"
        if any(word in error.lower() for word in _REFUSED):
            reason = hide_in_text(error.partition(_ITS_REMEDY)[0])[:300]
            return None, Refusal(source=SOURCE, reason=reason, remedy=_remedy())
    # A process that ends may have no Python line any more.
    return threads, None if threads is not None else Refusal(source=SOURCE, reason=hide_in_text(error)[:300])


def main_frames(threads: Any) -> tuple[tuple[str, str, int], ...] | None:
    """Return the main thread's frames as (file, function, line), innermost first, or None if it has none."""
    for thread in threads if isinstance(threads, list) else ():
        if thread.get("thread_name") == "MainThread" or thread.get("os_thread_id") == thread.get("pid"):
            frames = thread.get("frames") or ()
            return tuple((str(f.get("filename")), str(f.get("name")), int(f.get("line") or 0)) for f in frames) or None
    return None


def _remedy() -> str:
    return remedy_for_tracing(os.geteuid(), read_text(YAMA).strip())


def find_py_spy() -> str | None:
    """Return the py-spy beside our Python, else that on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def remedy_for_tracing(uid: int, scope: str) -> str:
    """Return what gives a user the right to read another process's memory; ``scope`` is yama's, empty without yama."""
    if scope == "3":
        return "yama's ptrace_scope is 3: nobody may read other processes until this machine boots with another value"
    if uid == 0:
        return (
            "This root lacks CAP_SYS_PTRACE. Docker: --cap-add SYS_PTRACE; Kubernetes: "
            f"securityContext.capabilities.add: [SYS_PTRACE], or {DEBUG_POD}"
        )
    if scope in {"1", "2"}:
        return (
            f"yama's ptrace_scope is {scope}: {SUDO}; or, until the next boot, sudo sysctl kernel.yama.ptrace_scope=0; "
            "or give this program CAP_SYS_PTRACE"
        )
    return f"{SUDO}; in a container: docker run --cap-add SYS_PTRACE, or {DEBUG_POD}"


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
