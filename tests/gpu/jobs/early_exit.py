"""Rank 1 leaves in the middle of training with status 0; rank 0 stands in item()."""

import sys

import torch
import torch.distributed as dist
from place import DEVICE, join


def main():
    rank = join()
    value = torch.ones(4, device=DEVICE)
    for step in range(20):
        if rank == 1 and step == 10:
            sys.exit(0)  # FAULT
        dist.all_reduce(value)
        value.sum().item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
