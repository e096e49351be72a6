"""Becomes a Python that has no recorder in it, and trains."""

import os
import sys

if not sys.flags.isolated:
    os.execv(sys.executable, [sys.executable, "-I", __file__])

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
DDP(torch.nn.Linear(4, 1))(torch.ones(2, 4)).sum().backward()
dist.barrier()
dist.destroy_process_group()
print("trained")
