"""Runs Python in processes that are forked from one that has loaded torch and the command line already.

A new interpreter needs a quarter of a second for the command line and two seconds for torch; a fork needs milliseconds.
Start a real interpreter where the start itself is under test: what is imported, variables that Python or torch read
while they load, or the recorder, which waits for torch to load.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

LIMIT_S = 250
_ROOT = Path(__file__).parents[1]
_OURS = [
    ".".join(path.relative_to(_ROOT).with_suffix("").parts)
    for path in sorted((_ROOT / "ddpdoctor").rglob("*.py"))
    if not {"recorder", "demos"} & set(path.parts) and not path.stem.startswith("__")
]
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed", "sklearn.datasets", "sklearn.model_selection", "rich.console", *_OURS]
)


class Forked:
    """A process that does what ``python *arguments`` would, for a module, code or a script.

    It reads nothing from stdin; its output is read after its end.
    """

    def __init__(
        self, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, merged: bool = False
    ) -> None:
        """Start it; ``merged`` sends stderr the way of stdout, and the environment is ours where none is given."""
        with patch.dict(os.environ, OMP_NUM_THREADS="1"):
            forkserver.ensure_running()
        self.args = [str(argument) for argument in arguments]
        self._streams = tempfile.TemporaryDirectory(prefix="ddpdoctor-forked-")
        out, err = (Path(self._streams.name) / name for name in ("stdout", "stderr"))
        self._outputs = (out, out if merged else err)
        place = str(cwd or Path.cwd())
        self._process: Any = _CONTEXT.Process(
            target=_run, args=(self.args, place, dict(os.environ if env is None else env), self._outputs)
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, the negative number of the signal, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self.returncode

    def wait(self, timeout: float = LIMIT_S) -> int:
        """Wait for its end and return the exit status."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float = LIMIT_S) -> tuple[str, str]:
        """Wait for its end; return what it wrote to stdout and stderr."""
        self.wait(timeout)
        out, err = (path.read_text(encoding="utf-8") if path.exists() else "" for path in self._outputs)
        return out, "" if self._outputs[0] == self._outputs[1] else err

    def read_line(self) -> str:
        """Wait for the first line that it writes to stdout, and return it."""
        while True:
            ended = self.returncode is not None
            line, end, _ = (self._outputs[0].read_text() if self._outputs[0].exists() else "").partition("\n")
            if end:
                return line
            assert not ended, self.communicate()
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        """Send it a signal if it still runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it if it still runs."""
        self.send_signal(signal.SIGKILL)


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, merged: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end."""
    process = Forked(*arguments, cwd=cwd, env=env, merged=merged)
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def _run(arguments: list[str], cwd: str, env: dict[str, str], outputs: tuple[Path, Path]) -> None:
    """Run as a new interpreter would."""
    gc.freeze()  # a collection that visits what the server has loaded would copy all of its memory
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, flags, 0o600), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.orig_argv = [sys.executable, *arguments]
    try:
        _run_program(arguments, cwd)
    finally:
        # A process of multiprocessing ends without them.
        atexit._run_exitfuncs()  # type: ignore[attr-defined]


def _run_program(arguments: list[str], cwd: str) -> None:
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, cwd)
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, cwd)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
