"""Two halves of the job with much different work; one waits at the end for longer than the hang timeout."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


def main():
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DDP(torch.nn.Linear(8, 2), process_group=halves[rank // 2])
    for _ in range(10 if rank < 2 else 60):
        model(torch.randn(4, 8)).mean().backward()
        time.sleep(0.12)


run(main)
