"""An autograd function of the user's raises on one rank, in the middle of a backward."""

import torch
import torch.distributed as dist
from training import train


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


train(load)
