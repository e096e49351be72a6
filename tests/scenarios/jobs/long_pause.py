"""One rank pauses for longer than the hang timeout, and then goes on."""

import time

import torch
import torch.distributed as dist
from training import run


def main():
    for step in range(20):
        if dist.get_rank() == 1 and step == 10:
            time.sleep(9)  # FAULT
        dist.all_reduce(torch.ones(4))


run(main)
