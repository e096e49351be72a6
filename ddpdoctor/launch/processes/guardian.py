"""A small process that outlives the watcher and ends the job if the watcher is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from ddpdoctor.collect import proc
from ddpdoctor.launch.processes.stopping import GRACE_S, Target, recorded, stop_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_DONE = b"done\n"


class Guardian:
    """A process that is forked before the launcher starts. Call ``dismiss`` when the job has ended."""

    def __init__(self, folder: Path, mark: Mapping[str, str], on_orphaned: Callable[[], None]) -> None:
        """Fork. Recorders write to ``folder``, and the job's environment holds ``mark``.

        ``on_orphaned`` runs in the guardian, after the job was stopped.
        """
        reader, self._writer = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:  # no process may be added: the job goes first, and its ranks outlive a watcher that is killed
            self.pid = -1
        if self.pid == 0:
            os.close(self._writer)
            _guard(reader, folder, mark, on_orphaned)
        os.close(reader)

    def protect_self(self) -> None:
        """Register this process as the launcher. The watcher's child calls it before it executes the launcher.

        The child holds the pipe open until then. So even if the watcher is killed, the guardian knows the launcher.
        """
        if self.pid < 0:
            return
        pid = os.getpid()
        own = proc.read_process(pid)
        with contextlib.suppress(OSError):
            os.write(self._writer, f"{pid} {own.start_ticks if own else 0}\n".encode())

    def dismiss(self) -> None:
        """Let the guardian exit without doing anything."""
        with contextlib.suppress(OSError):
            os.write(self._writer, _DONE)
        os.close(self._writer)
        if self.pid > 0:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def _guard(reader: int, folder: Path, mark: Mapping[str, str], on_orphaned: Callable[[], None]) -> None:
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        os.setsid()  # a SIGKILL to the watcher's whole process group must not end the guardian too
        text = b""
        while chunk := os.read(reader, 4096):
            text += chunk
        if text and not text.endswith(_DONE):
            pid, start_ticks = text.decode().split()
            _stop_orphans((int(pid), int(start_ticks)), folder, mark)
            on_orphaned()
    finally:
        os._exit(0)


def _stop_orphans(launcher: Target, folder: Path, mark: Mapping[str, str]) -> None:
    """Stop the launcher, its descendants, and all marked processes: a new rank may already have lost its parent."""

    def find(processes: dict[int, proc.Process]) -> list[Target]:
        marked = [p for p in processes.values() if proc.has_variables(p.pid, mark)]
        return [launcher, *recorded(folder), *((p.pid, p.start_ticks) for p in marked)]

    stop_all(find, GRACE_S)
