"""Two pairs of ranks with a model of their own each, in groups of their own, that pass tensors to each other.

The first pair takes longer for each step, so rank 2 waits for its tensors, and rank 3 for rank 2. Neither is slow.
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import run


def main():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(torch.nn.Linear(8, 2 + rank // 2), process_group=pairs[rank // 2])
    for _ in range(20):
        time.sleep(0.05 * (rank < 2))
        model(torch.randn(4, 8)).mean().backward()
        if rank == 1:
            dist.send(torch.ones(2), 2)
        if rank == 2:
            dist.recv(torch.ones(2), 1)
    dist.monitored_barrier()


run(main)
