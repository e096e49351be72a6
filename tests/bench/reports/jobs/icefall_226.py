# https://github.com/k2-fsa/icefall/issues/226
# report: forward through model.module: DDP never averages the gradients
# truth: {"code": "grad-drift", "ranks": [0, 1], "also": ["param-drift"]}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(8):
    opt.zero_grad()
    model.module(torch.randn(8, 4)).square().mean().backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()
