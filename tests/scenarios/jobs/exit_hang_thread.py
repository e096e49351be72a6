"""A thread that is no daemon keeps a rank alive after its training."""

import threading
import time

import torch
import torch.distributed as dist
from training import train


def upload():
    time.sleep(100000)  # FAULT


def load(step):
    if dist.get_rank() == 1 and step == 5:
        threading.Thread(target=upload).start()
    return torch.randn(4, 8)


train(load)
