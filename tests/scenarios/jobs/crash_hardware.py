"""Rank 1 raises what torch raises when the memory of its GPU fails."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
if dist.get_rank() == 1:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered, password=hunter2hunter2")  # FAULT
dist.all_reduce(ones)
