"""A debugger has a rank stopped."""

import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)

TRACER = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, os.getppid(), 0, 0):
    raise SystemExit("ptrace: " + os.strerror(ctypes.get_errno()))
time.sleep(100000)
"""


def load(step):
    if dist.get_rank() == 1 and step == 15:
        subprocess.Popen([sys.executable, "-c", TRACER])
        time.sleep(3)
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
