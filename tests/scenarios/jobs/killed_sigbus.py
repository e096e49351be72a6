"""A rank reads a mapped file that somebody has cut short."""

import mmap
import tempfile

import torch
import torch.distributed as dist
from training import train


def read_mapped():
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        view = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        return view[4096]  # FAULT


def load(step):
    if dist.get_rank() == 0 and step == 20:
        read_mapped()
    return torch.randn(4, 8)


train(load)
