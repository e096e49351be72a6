"""The script starts its ranks itself, and names the place where they meet itself."""

import socket

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def work(rank, world, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model = DDP(torch.nn.Linear(8, 2))
    for _ in range(20):
        model(torch.randn(4, 8)).mean().backward()
    dist.barrier()
    del model  # see training.run
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, args=(2, port), nprocs=2)
