"""Rank 1 is 0.1 s late to each step, on the host or on its device. Over NCCL only the times of the kernels tell: its own
are the shortest.
"""

import time

import torch
import torch.distributed as dist
from place import DEVICE, DRY, SEEDED, join
from torch.nn.parallel import DistributedDataParallel as DDP

CYCLES = 200_000_000
"""About 0.1 s of an H200."""


def main():
    rank = join()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 4).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        if rank == 1 and SEEDED and not DRY:
            torch.cuda._sleep(CYCLES)
        elif rank == 1:
            time.sleep(0.1)
        optimizer.zero_grad()
        model(torch.randn(8, 16, device=DEVICE)).square().mean().backward()
        optimizer.step()
        model.module.weight.sum().item()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
