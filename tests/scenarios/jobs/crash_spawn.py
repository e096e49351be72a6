"""A rank that the script started itself raises."""

import torch.distributed as dist
from training import random_batch, spawn


def load(step):
    if dist.get_rank() == 1 and step == 10:
        raise RuntimeError("no such shard")  # FAULT
    return random_batch(step)


if __name__ == "__main__":
    spawn(load)
