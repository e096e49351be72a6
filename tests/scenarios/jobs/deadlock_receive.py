"""Three of four ranks receive in a ring before they send; the fourth waits at a barrier."""

import torch
import torch.distributed as dist
from training import run


def main():
    rank = dist.get_rank()
    ones = torch.ones(4)
    dist.all_reduce(ones)
    if rank < 3:
        dist.recv(ones, src=(rank - 1) % 3)  # FAULT
        dist.send(ones, dst=(rank + 1) % 3)


run(main)
