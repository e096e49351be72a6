"""Native code of a rank aborts in the middle of training."""

import os

import torch
import torch.distributed as dist
from training import train


def load(step):
    if dist.get_rank() == 1 and step == 20:
        os.abort()  # FAULT
    return torch.randn(4, 8)


train(load)
