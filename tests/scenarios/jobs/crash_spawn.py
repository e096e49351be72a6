"""A rank that the script started itself raises."""

import os
import socket

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def load(rank, step):
    if rank == 1 and step == 10:
        raise RuntimeError("no such shard")  # FAULT
    return torch.randn(4, 8)


def work(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = DDP(torch.nn.Linear(8, 2))
    for step in range(20):
        model(load(rank, step)).mean().backward()
    dist.barrier()
    del model  # see training.run
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, args=(2, port), nprocs=2)
