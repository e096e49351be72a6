"""Ranks 1 and 3 of four are slow in the backward of a function of the script's own."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if rank in (1, 3):
            time.sleep(0.15)  # FAULT
        return gradient * 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, x):
        return Scale.apply(self.linear(x))


model = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(25):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
dist.barrier()
del model  # see training.leave
dist.destroy_process_group()
