"""An autograd function of the user's raises on one rank, in the middle of a backward."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        ctx.step = step
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if dist.get_rank() == 3 and ctx.step == 20:
            raise ArithmeticError("the loss is not finite")  # FAULT
        return grad * 2, None


def load(step):
    return Scale.apply(torch.randn(4, 8, requires_grad=True), step)


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
