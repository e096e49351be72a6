"""A process that a rank has started is never told to end."""

import multiprocessing
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def serve():
    time.sleep(100000)  # FAULT


def load(step):
    if dist.get_rank() == 0 and step == 5:
        multiprocessing.Process(target=serve).start()
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
