"""Trains well, and is aborted while the interpreter shuts down."""

import atexit
import os

import torch
import torch.distributed as dist
from training import run


def main():
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        atexit.register(os.abort)


run(main)
