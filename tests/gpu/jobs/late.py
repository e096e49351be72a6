"""Jobs that torch itself ends at the group's limit, with a network of DDP. WHAT names what rank 1 does.

"late": it comes to a call after the limit, and goes on. "leaves": it takes fewer steps, and goes to a barrier.
"""

import datetime
import os
import time

import torch
import torch.distributed as dist
from place import BACKEND, DEVICE, NUMBER, join
from torch.nn.parallel import DistributedDataParallel

WHAT = os.environ["WHAT"]
LIMIT_S = 8


def main():
    rank = join(timeout=datetime.timedelta(seconds=LIMIT_S))
    value = torch.ones(4, device=DEVICE)
    if WHAT == "late":
        for step in range(10):
            if rank == 1 and step == 5:
                time.sleep(3 * LIMIT_S)
            dist.all_reduce(value)
            value.sum().item()
    else:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        options = {"device_ids": [NUMBER]} if BACKEND == "nccl" else {}
        model = DistributedDataParallel(torch.nn.Sequential(*layers).to(DEVICE), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _step in range(15 if rank == 1 else 20):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16).to(DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()
        dist.barrier()  # FAULT leaves
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
