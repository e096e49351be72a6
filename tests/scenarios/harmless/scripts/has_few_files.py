"""Runs where few files may be open, trains, and needs every one of them."""

import os
import resource
import sys

MOST = 24
if resource.getrlimit(resource.RLIMIT_NOFILE)[0] != MOST:
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, MOST))
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
held = []
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        print(error, len(held))
dist.destroy_process_group()
