"""Rank 1 sleeps before a reduction of a second group, which NCCL splits off the first one, made at once."""

import time

import torch
import torch.distributed as dist
from place import DEVICE, SEEDED, join


def main():
    rank = join(at_once=True)
    group = dist.new_group([0, 1], group_desc="pair")
    alone = [dist.new_group([number]) for number in range(2)][rank]
    value = torch.ones(4, device=DEVICE)
    for step in range(20):
        dist.all_reduce(value)
        dist.all_reduce(value, group=alone)
        while rank == 1 and step == 10 and SEEDED:
            time.sleep(1000)  # FAULT
        dist.all_reduce(value, group=group)
        value.sum().item()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
