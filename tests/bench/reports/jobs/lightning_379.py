# https://github.com/Lightning-AI/pytorch-lightning/issues/379
# report: early stopping on one rank only: it ends, the others hang
# truth: {"code": "early-exit", "ranks": [1], "nproc": 3}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
    accuracy = 0.5 + 0.1 * epoch * rank if rank < 2 else 0.5
    if accuracy > 0.75:
        break
