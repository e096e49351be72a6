# https://github.com/pytorch/pytorch/issues/31771
# report: DistributedSampler gives the same order in every epoch: nobody called set_epoch
# truth: {"code": "no-set-epoch", "ranks": [0, 1]}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
data = TensorDataset(torch.arange(64.0).view(-1, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
model = DDP(torch.nn.Linear(1, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for epoch in range(3):
    for (batch,) in loader:
        opt.zero_grad()
        model(batch).mean().backward()
        opt.step()
dist.destroy_process_group()
