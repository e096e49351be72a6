# https://github.com/pytorch/pytorch/issues/12603
# report: gradients under DDP are not those of the same layer without it: they are averaged, as they should be
# truth: {"code": "clean", "ranks": []}
import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
alone = torch.nn.Linear(4, 1)
model = DDP(copy.deepcopy(alone))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(5):
    batch = torch.randn(8, 4)
    opt.zero_grad()
    alone.zero_grad()
    alone(batch).square().mean().backward()
    model(batch).square().mean().backward()
    print("difference", (alone.weight.grad - model.module.weight.grad).abs().max().item())
    opt.step()
    alone.load_state_dict(model.module.state_dict())
dist.destroy_process_group()
