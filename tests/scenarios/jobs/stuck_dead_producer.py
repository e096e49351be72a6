"""The process that fills the queue of a rank has ended too early, and the rank waits for its next batch."""

import multiprocessing

import torch
import torch.distributed as dist
from training import train

batches = multiprocessing.Queue(maxsize=4)


def produce(steps):
    for step in range(steps):
        batches.put(step)


def load(step):
    if step == 0:
        steps = 20 if dist.get_rank() == 1 else 60
        multiprocessing.Process(target=produce, args=(steps,), daemon=True).start()
    batches.get()  # FAULT
    return torch.randn(4, 8)


if __name__ == "__main__":
    train(load)
