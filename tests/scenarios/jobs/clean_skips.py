"""Ranks skip a step together, evaluate as often as they like, train by their own clocks, and call under a condition."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


def main():
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), float("inf") if rank == 1 and step == 9 else 1.0)).mean()
        finite = torch.isfinite(loss).float()
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            continue
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            with torch.no_grad():
                model(torch.ones(4, 8))
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        model.module(torch.ones(4, 8)).mean().backward()
    if rank == 0:
        objects = [{"loss": 1.0}]
        dist.broadcast_object_list(objects)
    else:
        objects = [None]
        dist.broadcast_object_list(objects)


run(main)
