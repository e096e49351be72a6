"""Something outside kills a rank between two collectives."""

import os
import signal

import torch
import torch.distributed as dist
from training import train


def load(step):
    if dist.get_rank() == 0 and step == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.randn(4, 8)


train(load)
