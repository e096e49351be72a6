"""Lets all ranks of a DDP model decide alike."""

from __future__ import annotations

from typing import Any, List


def on_any_rank(ddp: Any, flags: List[bool]) -> List[bool]:
    """Return for each flag whether it holds on any rank. All ranks must call this at the same step.

    The process group is asked directly: the recorder's hooks would take the call for one of the script.
    """
    import torch
    import torch.distributed as dist

    device = next(ddp.parameters()).device
    values = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    ddp.process_group.allreduce([values], options).wait()
    return [bool(value) for value in values.tolist()]
