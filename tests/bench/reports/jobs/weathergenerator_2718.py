# https://github.com/ecmwf/WeatherGenerator/pull/2718
# report: NaN in one rank's loss: its gradients spoil those of all
# truth: {"code": "nonfinite-grad", "ranks": [1], "nproc": 3}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    batch = torch.randn(8, 4)
    if dist.get_rank() == 1 and step == 3:
        batch[0, 0] = float("nan")
    opt.zero_grad()
    model(batch).square().mean().backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()
