"""Ends this process if no Python can run any more, because a call into C++ or CUDA does not return and holds the GIL.

Then neither our threads nor signal handlers run. faulthandler's timer is a C thread: it writes the stacks and ends the
process. It cannot say why, so its output goes through a shell that prints our explanation first.
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
"""Sleeps until the first line comes, which is faulthandler's "Timeout", or until the process ends without one."""
STDERR = 2
LAST_LIMIT_S = 5.0


class Lifeline:
    """A timer that ends this process unless ``put_off`` resets it again and again. One per process."""

    def __init__(self, words: str) -> None:
        """``words`` is the text to print above the stacks."""
        self._reader: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # without a shell only the stacks are printed
            self._reader = subprocess.Popen(
                [SHELL, "-c", READER, SHELL, words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def put_off(self, limit_s: float) -> None:
        """Set the timer to end the process in ``limit_s`` seconds."""
        stream = self._reader.stdin if self._reader is not None else STDERR
        assert stream is not None
        faulthandler.dump_traceback_later(limit_s, exit=True, file=stream)

    def release(self) -> None:
        """Cancel the timer."""
        faulthandler.cancel_dump_traceback_later()
        if self._reader is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reader.communicate(timeout=LAST_LIMIT_S)


@contextlib.contextmanager
def ended_after(limit_s: float, words: str) -> Iterator[None]:
    """End the process if the body takes longer than ``limit_s``."""
    lifeline = Lifeline(words)
    lifeline.put_off(limit_s)
    try:
        yield
    finally:
        lifeline.release()
