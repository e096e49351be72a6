# https://github.com/karpathy/llama2.c/issues/522
# report: no DistributedSampler under DDP: each rank draws with a seed of its own, which is fine
# truth: {"code": "clean", "ranks": []}
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Chunks(IterableDataset):
    def __iter__(self):
        draw = random.Random(42 + 1337 * dist.get_rank())
        tokens = torch.arange(4000.0)
        for _ in range(80):
            start = draw.randrange(3990)
            yield tokens[start : start + 4]


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in DataLoader(Chunks(), batch_size=8):
    opt.zero_grad()
    model(batch).mean().backward()
    opt.step()
dist.destroy_process_group()
