"""Rank 0 exports, part by part, for twice the hang timeout, while the others wait."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from training import train

HANG_TIMEOUT_S = 4


def write_part(folder, part):
    torch.save(torch.zeros(10), os.path.join(folder, f"{part}.pt"))
    time.sleep(0.4)


def pause():
    time.sleep(0.2)


def export():
    end = time.monotonic() + 2 * HANG_TIMEOUT_S
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            write_part(folder, "part")
            pause()


def load(step):
    if dist.get_rank() == 0 and step == 20:
        export()
    return torch.randn(4, 8)


train(load)
