"""A function that runs at the exit of a rank never returns."""

import atexit
import time

import torch
import torch.distributed as dist
from training import train


def close_log():
    time.sleep(100000)  # FAULT


def load(step):
    if dist.get_rank() == 0 and step == 5:
        atexit.register(close_log)
    return torch.randn(4, 8)


train(load)
