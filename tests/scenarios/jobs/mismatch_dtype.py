"""One rank reduces another dtype."""

import torch
import torch.distributed as dist
from training import run


def sync(rank):
    value = torch.ones(4, dtype=torch.float64 if rank == 0 else torch.float32)
    dist.all_reduce(value)  # FAULT


def main():
    for step in range(40):
        dist.all_reduce(torch.ones(16))
        if step == 20:
            sync(dist.get_rank())


run(main)
