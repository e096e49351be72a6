"""All ranks but the first end after training; the first calls a barrier: all of it outside of any function."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import loop

dist.init_process_group("gloo")
loop(DDP(torch.nn.Linear(8, 2)))
if dist.get_rank() == 0:
    dist.barrier()
    dist.destroy_process_group()
