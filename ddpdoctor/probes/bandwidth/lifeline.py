"""Ends this process where no Python can run any more: a call into C++ or CUDA does not return and keeps the GIL.

A thread of ours does not run then, and neither does a handler of signals. faulthandler's timer is a thread of C: it
writes the stacks and ends the process. It cannot say why, so its words go through a shell that puts ours before them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SHELL = "/bin/sh"
READER = 'IFS= read -r line || exit 0; printf "%s\\n" "$1" >&2; exec cat >&2'
"""Sleeps until there is a first line, which is faulthandler's "Timeout", or the process has ended without one."""
STDERR = 2
LAST_LIMIT_S = 5.0


class Lifeline:
    """A timer that ends this process unless it is put off again and again. There is one in a process."""

    def __init__(self, words: str) -> None:
        """Take what to tell the user above the stacks."""
        self._reader: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # without a shell there are the stacks alone
            self._reader = subprocess.Popen(
                [SHELL, "-c", READER, SHELL, words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def put_off(self, limit_s: float) -> None:
        """End the process in so many seconds."""
        told = self._reader.stdin if self._reader is not None else STDERR
        assert told is not None
        faulthandler.dump_traceback_later(limit_s, exit=True, file=told)

    def release(self) -> None:
        """Let the process live."""
        faulthandler.cancel_dump_traceback_later()
        if self._reader is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reader.communicate(timeout=LAST_LIMIT_S)


@contextlib.contextmanager
def ended_after(limit_s: float, words: str) -> Iterator[None]:
    """Have the process end where what is done within takes longer."""
    lifeline = Lifeline(words)
    lifeline.put_off(limit_s)
    try:
        yield
    finally:
        lifeline.release()
