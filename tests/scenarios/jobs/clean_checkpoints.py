"""Rank 0 saves a checkpoint every tenth step, which takes a second; nobody is slow."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    time.sleep(0.02)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    if rank == 0 and step % 10 == 0:
        time.sleep(1.0)
dist.barrier()
del model  # see training.leave
dist.destroy_process_group()
