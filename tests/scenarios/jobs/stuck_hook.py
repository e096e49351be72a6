"""A hook on a gradient never comes back, in the middle of a backward."""

import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


answered = threading.Event()


def report(grad):
    if dist.get_rank() == 3:
        answered.wait()  # FAULT


def load(step):
    rows = torch.randn(4, 8, requires_grad=True) * 2
    if step == 20:
        rows.register_hook(report)
    return rows


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
