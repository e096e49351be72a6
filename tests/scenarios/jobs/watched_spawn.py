"""Watches itself, and starts its ranks itself; rank 1 hangs."""

import socket
import sys
import time

import torch
import torch.distributed as dist

import ddpdoctor


def work(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for step in range(5):
        if rank == 1 and step == 3:
            time.sleep(100)  # FAULT
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ddpdoctor.watch(hang_timeout=4, on_hang="kill", report_dir=sys.argv[1]).start()
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
