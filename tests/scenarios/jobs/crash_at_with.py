"""Rank 1 raises an error, and its with block ends in a reduction that kills it before the error is printed."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import loop, run

NAMES = dict.fromkeys(range(70))


class Counted:
    def __enter__(self):
        dist.barrier()

    def __exit__(self, *unused):
        dist.all_reduce(torch.ones(1))  # no other rank is here, and Gloo aborts for the size


def load(step):
    NAMES[step + 20 * dist.get_rank()]  # FAULT
    return torch.randn(4, 8)


def work():
    with Counted():
        loop(DDP(torch.nn.Linear(8, 2)), load)


run(work)
