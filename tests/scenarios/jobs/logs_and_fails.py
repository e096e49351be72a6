"""Logs with TensorBoard to the folder that it is given, and fails on rank 1."""

import sys

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        with SummaryWriter(sys.argv[1]) as writer:
            for step in range(3):
                writer.add_scalar("loss", 1 / (step + 1), step)
    dist.barrier()
    if rank == 1:
        raise ValueError("<b>no</b> [such](https://example.org) sample")  # FAULT
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
