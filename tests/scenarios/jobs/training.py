"""What most jobs share: a group over Gloo, a small model, and a loop over batches."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def random_batch(step):
    return torch.randn(4, 8)


def loop(model, load=random_batch, steps=60):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        opt.zero_grad()
        model(load(step)).mean().backward()
        opt.step()


def train(load=random_batch, **group):
    run(lambda: loop(DDP(torch.nn.Linear(8, 2)), load), **group)


def run(work, **group):
    dist.init_process_group("gloo", **group)
    work()  # its model is freed before the group: after it, that can deadlock with a thread of Gloo
    dist.barrier()
    dist.destroy_process_group()
