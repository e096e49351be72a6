"""A virtual accelerator: layers whose forward and backward take time and no core, so a busy machine changes little.

A job of this folder has several ways to be slow, and looks alike that are healthy: functions, one of which its first
argument names.
"""

import io
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Work(torch.autograd.Function):
    """Takes ``seconds`` in forward and twice that in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layers(torch.nn.Module):
    """A step of it takes ``ms`` milliseconds, a third of them in forward."""

    def __init__(self, ms, count=4, width=64):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))
        self.seconds = ms / count / 3 / 1000

    def forward(self, x):
        for layer in self.layers:
            x = Work.apply(torch.relu(layer(x)), self.seconds)
        return x


class Stepper:
    """One optimizer step for each call with a batch."""

    def __init__(self, net, **options):
        self.net = net
        self.model = DDP(net, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def __call__(self, batch):
        self.optimizer.zero_grad()
        self.model(batch).mean().backward()
        self.optimizer.step()


class SlowDisk(io.BytesIO):
    """A file whose first write takes long, as on a busy network file system."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def write(self, data):
        time.sleep(self.seconds)
        self.seconds = 0
        return super().write(data)


def batch(width=64):
    return torch.randn(8, width)


def run(*ways):
    """Do what the first argument names, on all ranks of a group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {way.__name__: way for way in ways}[sys.argv[1]]()
    leave()


def leave():
    """Leave the group, or Gloo can abort at exit. DDP models are freed before: after the group, that can deadlock."""
    dist.barrier()
    dist.destroy_process_group()
