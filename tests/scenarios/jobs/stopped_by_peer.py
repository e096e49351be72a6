"""A rank is stopped by another process, while half of the ranks go on for a while."""

import os
import signal

import torch
import torch.distributed as dist
from training import run


def stop(rank):
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        os.kill(pids[2], signal.SIGSTOP)


def main():
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stop(rank)
    for _ in range(100):
        dist.all_reduce(torch.ones(4), group=halves[rank // 2])


run(main)
