"""One rank freezes a layer; DDP's constructor does not notice, and the first backward does not end."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import run


def main():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    if dist.get_rank() == 1:
        net[0].weight.requires_grad = False
    model = DistributedDataParallel(net)  # FAULT
    for _ in range(10):
        model(torch.randn(4, 8)).mean().backward()


run(main)
