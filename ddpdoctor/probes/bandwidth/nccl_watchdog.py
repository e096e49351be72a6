"""Keeps torch's NCCL watchdog from ending a rank of the bench before the report is written.

Our own thread reports a collective that fails or times out, and ends the ranks together. Without this module, torch
would do the following (``ProcessGroupNCCL`` of 2.6 to 2.15, and ``nccl2``, which is "nccl" from 2.15 on):

- If ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is not 0, the watchdog throws in its own thread or calls abort() within a
  second of an error on another rank, which gives SIGABRT. torchrun sets it to 1 if the user has not set it. With
  ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, ProcessGroupNCCL treats 0 as 3.
- The heartbeat monitor ends the process if the watchdog hangs, and after another rank has asked for a dump.
- The watchdog rethrows CUDA errors. The main thread gets them too, and reports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
