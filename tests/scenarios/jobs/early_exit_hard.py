"""A rank leaves at once, with status 0, while others wait on a group made of all."""

import os

import torch
import torch.distributed as dist
from training import train


def load(step):
    if dist.get_rank() == 0 and step == 30:
        os._exit(0)  # FAULT
    return torch.randn(4, 8)


train(load)
