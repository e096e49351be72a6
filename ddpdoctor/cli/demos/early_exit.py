"""Rank 1 exits with status 0 while rank 0 keeps training and waits for it."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def stop_early(step):
    if dist.get_rank() == 1 and step == 5:
        sys.exit(0)  # the fault: rank 0 does not know


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
        stop_early(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del model  # a model that outlives its group can deadlock with a thread of the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
