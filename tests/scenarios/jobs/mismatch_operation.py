"""One rank broadcasts where the others reduce."""

import torch
import torch.distributed as dist
from training import run


def sync(rank):
    value = torch.ones(4)
    if rank == 1:
        dist.broadcast(value, src=1)  # FAULT
    else:
        dist.all_reduce(value)


def main():
    for step in range(40):
        dist.all_reduce(torch.ones(16))
        if step == 20:
            sync(dist.get_rank())


run(main)
