"""Rank 1 prepares its batches ten times as long as the others."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def prepare(step):
    batch = torch.full((4, 8), float(step))
    if rank == 1:
        time.sleep(0.1)  # FAULT
    return batch


for step in range(25):
    batch = prepare(step)
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
del model  # see training.leave
dist.destroy_process_group()
