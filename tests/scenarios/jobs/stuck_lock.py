"""A rank waits for a lock that a thread of its own never gives back."""

import threading
import time

import torch
import torch.distributed as dist
from training import train

lock = threading.Lock()


def hold():
    with lock:
        time.sleep(100000)


def load(step):
    if dist.get_rank() == 1 and step == 20:
        threading.Thread(target=hold, daemon=True).start()
        time.sleep(0.2)
        lock.acquire()  # FAULT
    return torch.randn(4, 8)


train(load)
