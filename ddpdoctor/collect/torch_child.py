"""Starts a Python that imports torch, and waits for what it says. Imports next to nothing, so as to start at once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROBE = "ddpdoctor.probes.torch_facts"


class TorchChild:
    """A Python that imports torch and says what it got."""

    def __init__(self, env: Mapping[str, str], command: Sequence[str] = (sys.executable, "-m", PROBE)) -> None:
        """Start it, in the environment of a rank but without what loads the recorder; raises OSError."""
        self._process = subprocess.Popen(  # killed below where it does not end
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: value for name, value in env.items() if name != "DDPDOCTOR_RUN"},
        )

    def wait(self, limit_s: float) -> tuple[str, str, int | None]:
        """Return its stdout, its stderr and its exit status; None as status where it was killed after ``limit_s``.

        A process that the kernel does not let go of (a driver that hangs) is left behind.
        """
        try:
            out, err = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as late:
            self._process.kill()
            return _text(late.stdout), _text(late.stderr), None
        return _text(out), _text(err), self._process.returncode


def start_torch_child(env: Mapping[str, str] | None = None) -> TorchChild:
    """Start the child before heavy imports of one's own, to hand it on in a ``Plan``; raises OSError."""
    return TorchChild(os.environ if env is None else env)


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
