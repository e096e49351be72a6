"""A rank reduces one value fewer in a helper than the others: it shows when the helper has returned there."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


def reduce_all(values):
    for value in values:  # FAULT
        dist.all_reduce(value)


def main():
    model = DDP(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).mean().backward()  # FAULT
        optimizer.step()
        reduce_all([torch.ones(1)] * (1 if dist.get_rank() == 1 and step == 9 else 2))


run(main)
