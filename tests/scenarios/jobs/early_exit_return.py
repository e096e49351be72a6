"""A rank thinks that it is done, and ends well."""

import sys

import torch
import torch.distributed as dist
from training import train


def load(step):
    if dist.get_rank() == 2 and step == 30:
        sys.exit(0)  # FAULT
    return torch.randn(4, 8)


train(load)
