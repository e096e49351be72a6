"""Trains alone until a second node has joined, then on both with other settings on the second, until a file is there.

`nodes_join.py FOLDER`: it leaves the file `begun` there once it trains alone, and ends when `end` is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(sys.argv[1])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    rate = 0.1 if os.environ["GROUP_RANK"] == "0" else 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    while not asked_to_end():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()  # FAULT
        if dist.get_world_size() == 1:
            (FOLDER / "begun").touch()
        time.sleep(0.02)
    del model  # see training.leave
    dist.destroy_process_group()


def asked_to_end():
    reported = torch.tensor([int((FOLDER / "end").exists())])
    dist.broadcast(reported, 0)
    return bool(reported)


main()
