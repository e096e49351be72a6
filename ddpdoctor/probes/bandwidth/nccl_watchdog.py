"""Keeps torch's NCCL watchdog from ending a rank of ours before the report of what went wrong is written.

A collective that fails or times out is told by a thread of ours, which ends the ranks together. This is what torch
would do (``ProcessGroupNCCL`` of 2.6 to 2.15, and ``nccl2``, which is "nccl" from 2.15 on):

- With ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` other than 0 the watchdog throws in its own thread or calls abort(), within a
  second of an error on another rank: SIGABRT. torchrun sets it to 1 where the user has not set it. With
  ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` ProcessGroupNCCL takes 0 for 3.
- The heartbeat monitor ends the process where the watchdog hangs, and after another rank has asked for a dump.
- The watchdog throws errors of CUDA again. The main thread gets them too, and reports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
FORMER_HANDLING = "NCCL_ASYNC_ERROR_HANDLING"
"""Still read, where the other is not set."""
TORCHRUN, OF_TORCHRUN = "TORCHELASTIC_RUN_ID", "1"
OTHERS = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


def hold_watchdog(env: MutableMapping[str, str]) -> None:
    """Set what the user has not set. Before torch is loaded: its threads read the environment."""
    by_torchrun = TORCHRUN in env and env.get(HANDLING) == OF_TORCHRUN
    if by_torchrun or (HANDLING not in env and FORMER_HANDLING not in env):
        env[HANDLING] = "0"
    for name in OTHERS:
        env.setdefault(name, "0")
