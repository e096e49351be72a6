"""Both ranks wait for one reduction, behind kernels of rank 1 that take 24 s. Nothing is wrong."""

import torch
import torch.distributed as dist
from place import DEVICE, DRY, join

CYCLES = 2_000_000_000
"""About a second of an H200."""


def main():
    rank = join()
    value = torch.ones(4, device=DEVICE)
    for step in range(20):
        if rank == 1 and step == 10 and not DRY:
            for _ in range(24):
                torch.cuda._sleep(CYCLES)
        dist.all_reduce(value)
        value.sum().item()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
