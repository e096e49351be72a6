"""A rank polls for a file that never comes; the look is taken by a function of its own."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def is_there(path):
    return os.path.exists(path)


def wait_for(path):
    while not is_there(path):  # FAULT
        time.sleep(0.2)  # FAULT


def load(step):
    if dist.get_rank() == 0 and step == 20:
        wait_for("/nowhere/shard-0")
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
