# https://github.com/modelscope/FunASR/pull/3472
# report: no_sync around the micro-batch of the optimizer step in place of the others
# truth: {"code": "grad-drift", "ranks": [0, 1], "also": ["param-drift"]}
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
accumulate = 2
for index in range(12):
    quiet = model.no_sync() if index % accumulate else contextlib.nullcontext()
    with quiet:
        model(torch.randn(8, 4)).square().mean().backward()
    if (index + 1) % accumulate == 0:
        opt.step()
        opt.zero_grad()
dist.barrier()
dist.destroy_process_group()
