"""A stage of a pipeline has received its input, and waits for a signal; DDP reduces over all stages."""

import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import run


def pass_on(rank, step):
    value = torch.zeros(3)
    if rank > 0:
        dist.recv(value, rank - 1)
    if rank == 1 and step == 10:
        signal.pause()  # FAULT
    if rank < dist.get_world_size() - 1:
        dist.send(value, rank + 1)


def main():
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    for step in range(40):
        pass_on(dist.get_rank(), step)
        model(torch.randn(4, 8)).mean().backward()


run(main)
