"""A small process that outlives the watcher, and ends the job if the watcher is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from ddpdoctor.collect import proc

if TYPE_CHECKING:
    from collections.abc import Callable

GRACE_S = 2.0


class Guardian:
    """Started before the launcher. ``dismiss`` it when the job has ended."""

    def __init__(self, on_orphaned: Callable[[], None]) -> None:
        """Fork. ``on_orphaned`` runs in the guardian, after the job was stopped."""
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            _guard(reader, on_orphaned)
        os.close(reader)
        os.set_inheritable(self._writer, False)  # noqa: FBT003 - positional only

    def protect(self, launcher_pid: int) -> None:
        """Name the process whose descendants are the job."""
        os.write(self._writer, f"{launcher_pid}\n".encode())

    def dismiss(self) -> None:
        """Let the guardian end without doing anything."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"done\n")
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _guard(reader: int, on_orphaned: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    text = b""
    try:
        while chunk := os.read(reader, 4096):
            text += chunk
        lines = text.decode().split()
        if lines and lines[-1] != "done":
            stop_tree(int(lines[-1]))
            on_orphaned()
    finally:
        os._exit(0)


def stop_tree(pid: int) -> None:
    """Stop a process and all below it: SIGTERM, and after a moment SIGKILL to what is left."""
    processes = proc.read_processes()
    targets = [(p.pid, p.start_ticks) for p in proc.descendants(pid, processes)]
    if pid in processes:
        targets.append((pid, processes[pid].start_ticks))
    _signal(targets, signal.SIGTERM)
    _signal(targets, signal.SIGCONT)
    limit = time.monotonic() + GRACE_S
    while time.monotonic() < limit and any(is_same(*target) for target in targets):
        time.sleep(0.05)
    _signal(targets, signal.SIGKILL)


def is_same(pid: int, start_ticks: int) -> bool:
    """Return whether the very process still runs, and is no zombie."""
    process = proc.read_process(pid)
    return process is not None and process.start_ticks == start_ticks and process.state not in "ZX"


def _signal(targets: list[tuple[int, int]], number: signal.Signals) -> None:
    for target in targets:
        if is_same(*target):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target[0], number)
