"""Rank 1 sleeps past the group's limit of 15 s, so that torch itself ends rank 0, the innocent one."""

import datetime
import time

import torch
import torch.distributed as dist
from place import DEVICE, join


def main():
    rank = join(timeout=datetime.timedelta(seconds=15))
    value = torch.ones(4, device=DEVICE)
    for step in range(20):
        while rank == 1 and step == 10:
            time.sleep(1000)  # FAULT
        dist.all_reduce(value)
        value.sum().item()


if __name__ == "__main__":
    main()
