"""A thread that reads ahead has ended with an error, and the training loop waits for its next batch."""

import queue
import threading

import torch
import torch.distributed as dist
from training import train

batches = queue.Queue()


def read_ahead(rank):
    for step in range(60):
        if rank == 2 and step == 20:
            raise OSError("no such shard")
        batches.put(torch.randn(4, 8))


def load(step):
    if step == 0:
        threading.Thread(target=read_ahead, args=(dist.get_rank(),), daemon=True).start()
    return batches.get()  # FAULT


train(load)
