# https://github.com/pytorch/pytorch/issues/22095
# report: two forwards of a BatchNorm before one backward: raised once, is fine today
# truth: {"code": "clean", "ranks": []}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    real, fake = model(torch.randn(8, 4)), model(torch.randn(8, 4))
    opt.zero_grad()
    (real - fake).square().mean().backward()
    opt.step()
dist.destroy_process_group()
