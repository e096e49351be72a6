"""A rank reads a mapped file that somebody has cut short."""

import mmap
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def read_mapped():
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        view = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        return view[4096]  # FAULT


def load(step):
    if dist.get_rank() == 0 and step == 20:
        read_mapped()
    return torch.randn(4, 8)


def train(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        opt.zero_grad()
        model(load(step)).mean().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    train(DDP(torch.nn.Linear(8, 2)), 60)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
