"""A rank waits in C and holds the GIL, so that no Python thread of it can answer."""

import ctypes

import torch
import torch.distributed as dist
from training import train


def load(step):
    if dist.get_rank() == 0 and step == 10:
        ctypes.PyDLL(None).sleep(100000)  # FAULT
    return torch.randn(4, 8)


train(load)
