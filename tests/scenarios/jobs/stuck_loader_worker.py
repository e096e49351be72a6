"""A DataLoader worker of one rank never returns a sample."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from training import batches, run


def read(i):
    if i == 33:
        time.sleep(100000)  # FAULT
    return torch.randn(8)


def main():
    model = DDP(torch.nn.Linear(8, 2))
    for batch in batches(read):
        model(batch).mean().backward()


if __name__ == "__main__":
    run(main)
