"""Imports torch, and keeps its NCCL watchdog from ending a rank before the report is written.

Our own thread reports a collective that fails or times out, and ends the ranks together. Otherwise torch would do the
following (``ProcessGroupNCCL`` of 2.6 to 2.15, and ``nccl2``, which is "nccl" from 2.15 on):

- If ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is not 0, the watchdog throws in its own thread or calls abort() within a
  second of an error on another rank, which gives SIGABRT. torchrun sets it to 1 if the user has not set it. With
  ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, ProcessGroupNCCL treats 0 as 3.
- The heartbeat monitor ends the process if the watchdog hangs, and after another rank has asked for a dump.
- The watchdog rethrows CUDA errors. The main thread gets them too, and reports them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
FORMER_HANDLING = "NCCL_ASYNC_ERROR_HANDLING"
"""The older name, which torch still reads if the new one is not set."""
TORCHRUN, OF_TORCHRUN = "TORCHELASTIC_RUN_ID", "1"
OTHERS = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


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
