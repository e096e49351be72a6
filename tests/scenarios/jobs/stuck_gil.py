"""A rank waits in C and holds the GIL, so that no Python thread of it can answer."""

import ctypes

import torch
import torch.distributed as dist
from training import train


def load(step):
    if dist.get_rank() == 0 and step == 10:
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        # A signal would end a sleep, and the job would go on while it is stopped.
        lock(mutex)  # FAULT
    return torch.randn(4, 8)


train(load)
