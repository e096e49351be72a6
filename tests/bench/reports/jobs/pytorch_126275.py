# https://github.com/pytorch/pytorch/issues/126275
# report: torch warns that nobody called destroy_process_group: the job is done all the same
# truth: {"code": "clean", "ranks": []}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
dist.barrier()
