"""Each rank trains a model; "wrong" makes no process group, so that no gradient is averaged."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRONG = sys.argv[1] == "wrong"
STEPS = 40


def train() -> None:
    model: nn.Module = nn.Linear(8, 4)
    if not WRONG:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model
    if not WRONG:
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
