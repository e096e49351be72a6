"""Hangs, and has a SIGTERM handler of its own that ends nothing."""

import signal
import time

import torch
import torch.distributed as dist
from training import run


def main():
    signal.signal(signal.SIGTERM, lambda *unused: print("not now", flush=True))
    dist.all_reduce(torch.ones(4))
    while dist.get_rank() == 1:
        time.sleep(1000)  # FAULT


run(main)
