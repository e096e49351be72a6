"""The command is rank 0: it starts rank 1 before it joins it, as Lightning does. Rank 1 fails, and evaluated before."""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from training import train


def evaluate(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def load(step):
    if dist.get_rank() == 1 and step == 10:
        torch.multiprocessing.spawn(evaluate, args=(tempfile.mkdtemp(),), nprocs=2)
    if dist.get_rank() == 1 and step == 20:
        raise OSError("no such shard")  # FAULT
    return torch.randn(4, 8)


if __name__ == "__main__":
    meeting = sys.argv[1]
    if "LOCAL_RANK" not in os.environ:
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
    train(load, init_method=f"file://{meeting}", rank=int(os.environ.get("LOCAL_RANK", "0")), world_size=2)
