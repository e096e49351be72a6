"""A process that a rank has started is never asked to end."""

import multiprocessing
import time

import torch
import torch.distributed as dist
from training import train


def serve():
    time.sleep(100000)  # FAULT


def load(step):
    if dist.get_rank() == 0 and step == 5:
        multiprocessing.Process(target=serve).start()
    return torch.randn(4, 8)


if __name__ == "__main__":
    train(load)
