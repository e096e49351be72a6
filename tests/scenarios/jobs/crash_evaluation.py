"""Rank 0 evaluates alone and fails, while the others wait at the barrier after it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def load(step):
    return torch.randn(4, 8)


def evaluate(model):
    with torch.no_grad():
        guess = model(torch.randn(4, 8))
    assert guess.shape == (4, 3), "wrong head"  # FAULT


def train(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        opt.zero_grad()
        model(load(step)).mean().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 2))
    train(model, 20)
    if dist.get_rank() == 0:
        evaluate(model.module)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
