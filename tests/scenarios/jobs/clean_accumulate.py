"""Gradient accumulation under no_sync, evaluation without gradients, forked loader workers."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from training import batches, run


def read(i):
    return torch.randn(8)


def main():
    model = DDP(torch.nn.Linear(8, 2))
    for batch in batches(read):
        with model.no_sync():
            model(batch).mean().backward()
        model(batch).mean().backward()
    with torch.no_grad():
        model(torch.randn(4, 8))


if __name__ == "__main__":
    run(main)
