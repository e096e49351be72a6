"""Rank 0 evaluates without collectives for longer than the hang timeout, batch by batch; the others wait."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from training import run


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x)


def evaluate(model):
    model.eval()
    loss = 0.0
    with torch.no_grad():
        for (x,) in DataLoader(TensorDataset(torch.randn(60, 8)), batch_size=4):
            time.sleep(0.4)  # a larger model
            loss += model.module(x).mean().item()
    model.train()
    return loss


def main():
    model = DDP(Net())
    for step in range(40):
        model(torch.randn(4, 8)).mean().backward()
        if step == 20 and dist.get_rank() == 0:
            print(evaluate(model))


run(main)
