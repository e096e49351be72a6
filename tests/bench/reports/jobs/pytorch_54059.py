# https://github.com/pytorch/pytorch/issues/54059
# report: rank 0 validates through the DDP object while the others wait in a barrier
# truth: {"code": "mismatch", "ranks": [0], "nproc": 3, "line": true}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        opt.step()
    if dist.get_rank() == 0:
        model.eval()
        print("validation", model(torch.randn(8, 4)).mean().item())  # CULPRIT
        model.train()
    dist.barrier()
dist.destroy_process_group()
