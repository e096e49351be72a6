"""Without DDP: gradients are averaged by hand, and rank 2 loses time each step."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])


def measure(step):
    if rank == 2:
        time.sleep(0.1)  # FAULT
    return torch.full((16,), float(step))


for step in range(25):
    value = measure(step)
    dist.all_reduce(value)
    dist.all_reduce(value)
dist.destroy_process_group()
