# https://github.com/Lightning-AI/pytorch-lightning/issues/19045
# report: each rank goes by its own metric when it saves, and saving has a barrier
# truth: {"code": "mismatch", "ranks": [2], "nproc": 3, "line": true}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
best = 1.0


def save_checkpoint():
    state = model.state_dict() if rank == 0 else None
    dist.barrier()  # CULPRIT
    return state


for epoch in range(6):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
    metric = 0.5 if rank == 2 and epoch == 3 else 2.0
    if metric < best:
        best = metric
        save_checkpoint()
dist.destroy_process_group()
