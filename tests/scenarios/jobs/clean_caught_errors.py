"""Errors that the script expects and catches; the wish to stop comes from one rank, and all leave by sys.exit."""

import queue
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def read(step):
    if step % 7 == dist.get_rank():
        raise ValueError("bad record")
    return torch.randn(4, 8)


def load(step):
    try:
        return read(step)
    except ValueError:
        return torch.zeros(4, 8)


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 2))
    inbox = queue.Queue()
    for step in range(40):
        try:
            inbox.get(timeout=0.01)
        except queue.Empty:
            pass
        model(load(step)).mean().backward()
        stop = [step == 30]
        dist.broadcast_object_list(stop, src=2)
        if stop[0]:
            break
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
