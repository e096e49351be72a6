"""A rank skips the backward of one step, since its own loss is not finite: it shows when the others still train."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


def main():
    model = DDP(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        batch = torch.full((4, 8), float("inf") if dist.get_rank() == 1 and step == 9 else 1.0)
        optimizer.zero_grad()
        loss = model(batch).mean()
        if not torch.isfinite(loss):  # FAULT
            continue  # FAULT
        loss.backward()
        optimizer.step()


run(main)
