"""A thread that reads ahead has ended with an error, and the training loop waits for its next batch."""

import queue
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


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


def train(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        opt.zero_grad()
        model(load(step)).mean().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    train(DDP(torch.nn.Linear(8, 2)), 60)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
