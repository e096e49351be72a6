"""A watchdog of each rank ends it after some seconds without a step; rank 2 is stuck, and the others' fire first."""

import faulthandler
import os
import threading
import time

import torch
import torch.distributed as dist
from training import train

last = [time.monotonic()]


def watch(limit_s):
    while time.monotonic() - last[0] < limit_s:
        time.sleep(0.1)
    os._exit(17)


def load(step):
    rank = dist.get_rank()
    last[0] = time.monotonic()
    if rank == 0:
        faulthandler.dump_traceback_later(2, exit=True)
    elif step == 0:
        threading.Thread(target=watch, args=(2 + rank,), daemon=True).start()
    if rank == 2 and step == 20:
        threading.Event().wait()  # FAULT
    return torch.randn(4, 8)


train(load)
