"""One rank reduces a tensor of another shape."""

import torch
import torch.distributed as dist
from training import run


def sync(rank):
    sums = torch.ones(5 if rank == 2 else 4)
    dist.all_reduce(sums)  # FAULT


def main():
    for step in range(40):
        dist.all_reduce(torch.ones(16))
        if step == 20:
            sync(dist.get_rank())


run(main)
