"""Rank 0 runs 150 reductions ahead of rank 1, which sleeps before the first. The shape of each tells
which one it is: number 1, of one element, is the one that is waited for.
"""

import time

import torch
import torch.distributed as dist
from place import DEVICE, join


def main():
    rank = join(at_once=True)
    values = [torch.ones(number, device=DEVICE) for number in range(1, 151)]
    while rank == 1:
        time.sleep(1000)  # FAULT
    works = [dist.all_reduce(value, async_op=True) for value in values]
    for work in works:
        work.wait()
    values[-1].sum().item()


if __name__ == "__main__":
    main()
