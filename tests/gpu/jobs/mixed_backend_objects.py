"""A group over Gloo and NCCL: rank 1 sleeps between two collectives of objects, which go over Gloo."""

import time

import torch
import torch.distributed as dist
from place import DEVICE, DRY, SEEDED, join


def main():
    rank = join("gloo" if DRY else "cpu:gloo,cuda:nccl")
    value = torch.ones(4, device=DEVICE)
    found = [None, None]
    for step in range(20):
        dist.all_reduce(value)
        value.sum().item()
        dist.all_gather_object(found, {"step": step})
        while rank == 1 and step == 10 and SEEDED:
            time.sleep(1000)  # FAULT
        dist.all_gather_object(found, {"step": step})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
