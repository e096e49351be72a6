"""A function of the script's own reduces in backward, on one rank not always."""

import torch
import torch.distributed as dist
from training import run


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, empty):
        ctx.empty = empty
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        if ctx.empty:  # FAULT
            return gradient, None  # FAULT
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient, None


def main():
    model = torch.nn.Linear(8, 2)
    for step in range(20):
        empty = dist.get_rank() == 1 and step == 9
        Summed.apply(model(torch.randn(4, 8)), empty).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


run(main)
