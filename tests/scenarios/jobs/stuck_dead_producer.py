"""The process that fills the queue of a rank has ended too early, and the rank waits for its next batch."""

import multiprocessing

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


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
