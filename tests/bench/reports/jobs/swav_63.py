# https://github.com/facebookresearch/swav/issues/63
# report: torch warns that find_unused_parameters finds none: slower, not wrong
# truth: {"code": "clean", "ranks": []}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1), find_unused_parameters=True)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
dist.destroy_process_group()
