"""Rank 1 sleeps before its forward. Rank 0's reduction was begun by DDP's C++, and it stands in item()."""

import time

import torch
from place import DEVICE, join
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank = join()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 4).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20):
        while rank == 1 and step == 10:
            time.sleep(1000)  # FAULT
        optimizer.zero_grad()
        model(torch.randn(8, 16, device=DEVICE)).square().mean().backward()
        optimizer.step()
        model.module.weight.sum().item()


if __name__ == "__main__":
    main()
