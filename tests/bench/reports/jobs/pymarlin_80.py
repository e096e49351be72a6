# https://github.com/microsoft/PyMarlin/issues/80
# report: one rank has fewer training batches than the others
# truth: {"code": "uneven-batches", "ranks": [1], "nproc": 3, "also": ["mismatch"], "line": true}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
share = TensorDataset(torch.randn(24 if dist.get_rank() == 1 else 32, 4))
for (batch,) in DataLoader(share, batch_size=8):  # CULPRIT
    opt.zero_grad()
    model(batch).mean().backward()
    opt.step()
dist.barrier()  # CULPRIT
dist.destroy_process_group()
