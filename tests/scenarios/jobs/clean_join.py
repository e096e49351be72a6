"""Uneven inputs under join."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


def main():
    model = DDP(torch.nn.Linear(8, 2))
    with model.join():
        for _ in range(20 + 5 * dist.get_rank()):
            model(torch.randn(4, 8)).mean().backward()


run(main)
