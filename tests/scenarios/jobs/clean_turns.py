"""Each rank in turn is the slow one of a step, as with inputs of random lengths."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    time.sleep(0.1 if step % world == rank else 0.01)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
dist.barrier()
del model  # see training.leave
dist.destroy_process_group()
