"""torch.compile around DDP with a static graph and activation checkpointing."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from training import loop, run


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def main():
    loop(DDP(Net(), static_graph=True), steps=20)
    loop(torch.compile(DDP(torch.nn.Linear(8, 2))), steps=10)


run(main)
