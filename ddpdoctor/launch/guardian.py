"""A small process that outlives the watcher, and ends the job if the watcher is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from ddpdoctor.launch.stopping import stop_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Guardian:
    """Started before the launcher. ``dismiss`` it when the job has ended."""

    def __init__(self, folder: Path, on_orphaned: Callable[[], None]) -> None:
        """Fork. Recorders write to ``folder``; ``on_orphaned`` runs in the guardian, after the job was stopped."""
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            _guard(reader, folder, on_orphaned)
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


def _guard(reader: int, folder: Path, on_orphaned: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    text = b""
    try:
        while chunk := os.read(reader, 4096):
            text += chunk
        lines = text.decode().split()
        if lines and lines[-1] != "done":
            stop_tree(int(lines[-1]), folder)
            on_orphaned()
    finally:
        os._exit(0)
