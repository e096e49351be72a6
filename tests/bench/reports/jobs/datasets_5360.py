# https://github.com/huggingface/datasets/issues/5360
# report: an IterableDataset that nobody shards gives all ranks the same samples
# truth: {"code": "duplicate-data", "ranks": [0, 1]}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(160):
            yield torch.full((4,), float(index))


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in DataLoader(Stream(), batch_size=8):
    opt.zero_grad()
    model(batch).mean().backward()
    opt.step()
dist.destroy_process_group()
