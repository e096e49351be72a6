"""A rank stops early by its own loss, leaves the loop and ends well."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def train(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        opt.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        opt.step()
        if dist.get_rank() == 1 and step == 30:
            break


dist.init_process_group("gloo")
train(DDP(torch.nn.Linear(8, 2)), 60)
print("done")
