"""A rank spins over several lines of one function."""

import torch
import torch.distributed as dist
from training import train


def load(step):
    ready = False
    tries = 0
    while dist.get_rank() == 1 and step == 15 and not ready:  # FAULT
        tries += 1  # FAULT
        ready = tries < 0  # FAULT
    return torch.randn(4, 8)


train(load)
