"""Trains a model in float64, and prints a checksum of its parameters after each step."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
layers = [torch.nn.Linear(64, 64) for _ in range(10)]
model = DDP(torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
torch.manual_seed(dist.get_rank())
steps, checkpoint = int(sys.argv[1]), sys.argv[2]
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    checksum = sum(parameter.detach().abs().sum() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(checksum.item().hex(), flush=True)
    torch.save(model.state_dict(), checkpoint)
