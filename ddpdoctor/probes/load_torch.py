"""Imports torch so that neither its NCCL watchdog nor a call that holds the GIL for ever ends or outlives the probe."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import subprocess
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
FORMER_HANDLING = "NCCL_ASYNC_ERROR_HANDLING"
"""The older name, which torch still reads if the new one is not set."""
TORCHRUN, OF_TORCHRUN = "TORCHELASTIC_RUN_ID", "1"
OTHERS = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")
SHELL = "/bin/sh"
READER = 'IFS= read -r line || exit 0; printf "%s\\n" "$1" >&2; exec cat >&2'
"""Sleeps until the first line comes, which is faulthandler's "Timeout", or until the process ends without one."""
STDERR = 2
LAST_LIMIT_S = 5.0


def hold_watchdog(env: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set. Call it before torch is loaded: its threads read the environment."""
    by_torchrun = TORCHRUN in env and env.get(HANDLING) == OF_TORCHRUN
    if by_torchrun or (HANDLING not in env and FORMER_HANDLING not in env):
        env[HANDLING] = "0"
    for name in OTHERS:
        env.setdefault(name, "0")


def load_torch() -> None:
    """Import torch on a rank that may use NCCL. Raises ``UserError`` if that fails."""
    hold_watchdog(os.environ)
    # torch reads this on import. Its C++ would only log peers that leave and names that do not resolve.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import_torch()


def import_torch() -> None:
    """Import torch with its distributed package. Raises ``UserError`` if that fails."""
    try:
        import torch.distributed  # noqa: F401 - loaded for what follows
    except (ImportError, OSError) as error:
        raise UserError(
            f"torch cannot be imported: {error}", help="`ddpdoctor check-env` says what is wrong with it."
        ) from error


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
