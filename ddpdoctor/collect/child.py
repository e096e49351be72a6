"""Runs a program of ours that may hang in the kernel, where neither a thread nor a signal could end it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOT_FOR_CHILDREN = frozenset({"DDPDOCTOR_RUN"})
"""What loads the recorder of `wrap`: not into programs of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """How a child ended, and what it wrote."""

    out: str
    err: str
    status: int | None
    """None where it did not end in time, and was killed or, in an uninterruptible sleep, left behind."""

    @property
    def last_error(self) -> str:
        """Return the last line that it wrote to stderr."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status}"


class Child:
    """A program that runs beside us."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a Python of ours, in our environment but without what loads the recorder. Raises OSError."""
        self._process = start_program(
            [sys.executable, *command],
            {name: value for name, value in env.items() if name not in NOT_FOR_CHILDREN},
        )

    def wait(self, limit_s: float) -> ChildEnd:
        """Return how it ended, and what it wrote, within ``limit_s``."""
        return wait_for_program(self._process, limit_s)


def start_program(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program that reads nothing, and whose output is kept. Raises OSError."""
    return subprocess.Popen(  # killed below where it does not end
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )


def wait_for_program(process: subprocess.Popen[bytes], limit_s: float) -> ChildEnd:
    """Wait until it ends or for ``limit_s``; what it wrote by then is kept.

    One that is killed is not waited for, as ``subprocess.run`` would do: in an uninterruptible sleep it does not end.
    """
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        process.kill()
        return ChildEnd(out=_text(late.stdout), err=_text(late.stderr), status=None)
    return ChildEnd(out=_text(out), err=_text(err), status=process.returncode)


def run_child(module: str, arguments: Sequence[str], env: Mapping[str, str], limit_s: float) -> ChildEnd:
    """Run ``python -m module`` until it ends or for ``limit_s``. Raises OSError."""
    return Child(("-m", module, *arguments), env).wait(limit_s)


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
