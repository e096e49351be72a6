"""A rank polls for a file that never comes; the look is taken by a function of its own."""

import os
import time

import torch
import torch.distributed as dist
from training import train


def is_there(path):
    return os.path.exists(path)


def wait_for(path):
    while not is_there(path):  # FAULT
        time.sleep(0.2)  # FAULT


def load(step):
    if dist.get_rank() == 0 and step == 20:
        wait_for("/nowhere/shard-0")
    return torch.randn(4, 8)


train(load)
