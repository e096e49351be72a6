"""A hook on a gradient never comes back, in the middle of a backward."""

import threading

import torch
import torch.distributed as dist
from training import train

answered = threading.Event()


def report(grad):
    if dist.get_rank() == 3:
        answered.wait()  # FAULT


def load(step):
    rows = torch.randn(4, 8, requires_grad=True) * 2
    if step == 20:
        rows.register_hook(report)
    return rows


train(load)
