"""Somebody ends one rank by kill."""

import os
import subprocess
import time

import torch
import torch.distributed as dist
from training import train


def load(step):
    if dist.get_rank() == 2 and step == 20:
        subprocess.run(["kill", str(os.getpid())])
        time.sleep(1000)
    return torch.randn(4, 8)


train(load)
