"""Rank 0 of two is slow in a layer of its model; buffers of batch norm go out from it."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        if rank == 0:
            time.sleep(0.1)  # FAULT
        return self.norm(self.linear(x))


model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(Layer(), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(25):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
dist.barrier()
del model  # see training.leave
dist.destroy_process_group()
