"""What most jobs share: a group over Gloo, a small model, and a loop over batches."""

import os
import socket

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


def spawn(load=random_batch, join="env://"):
    """Start two ranks that train, as a script without a launcher does; ``join`` is their ``init_method``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_spawned, args=(load, join, port), nprocs=2)


def _spawned(rank, load, join, port):
    if join == "env://":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(load, init_method=join.format(port=port), rank=rank, world_size=2)


class Rows(torch.utils.data.Dataset):
    def __init__(self, read):
        self.read = read

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return self.read(i)


def batches(read):
    """Return a loader whose two workers make each sample by ``read``, from its number."""
    rows = Rows(read)
    sampler = torch.utils.data.DistributedSampler(rows, shuffle=False)
    return torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler, num_workers=2)


def run(work, **group):
    dist.init_process_group("gloo", **group)
    work()
    leave()


def leave():
    """Leave the group, or Gloo can abort at exit. DDP models are freed before: after the group, that can deadlock."""
    dist.barrier()
    dist.destroy_process_group()
