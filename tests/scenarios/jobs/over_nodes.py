"""Ranks of several nodes reduce together, and one of them does wrong: which wrong, the first argument says."""

import os
import pathlib
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
CULPRIT = 1
FAULT_AT = 10


def fail(what, value):
    if what == "stuck":
        time.sleep(100000)  # FAULT stuck
    if what == "crash":
        raise ValueError("no such sample")  # FAULT crash
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "deadlock":
        dist.recv(value, src=0)  # FAULT deadlock
    if what == "exit-hang":
        threading.Thread(target=linger).start()


def linger():
    time.sleep(100000)  # FAULT exit-hang


def train(what, steps, begun):
    rank = dist.get_rank()
    value = torch.ones(16)
    for step in range(steps):
        if rank == CULPRIT and step == FAULT_AT:
            fail(what, value)
        dist.all_reduce(value)
        if step == FAULT_AT and begun:
            pathlib.Path(f"{begun}-{rank}").touch()


def main():
    what, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    train(what, steps, next(iter(sys.argv[3:]), ""))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
