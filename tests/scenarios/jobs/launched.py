"""A few steps, on ranks that any launcher has started; MODE says what goes wrong, on the rank BAD."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

for ours, theirs in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
    if theirs in os.environ:
        os.environ[ours] = os.environ[theirs]
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")


def fail(mode):
    if mode == "raise":
        raise LookupError("bad batch")  # FAULT
    if mode == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)  # FAULT
    if mode == "stuck":
        while True:
            time.sleep(0.01)  # FAULT
    if mode == "exit":
        sys.exit(3)  # FAULT


def main():
    dist.init_process_group("gloo")
    for step in range(5):
        if step == 3 and dist.get_rank() == int(os.environ.get("BAD", "1")):
            fail(os.environ.get("MODE", ""))
        elif step == 3 and "OTHERS_COMPUTE" in os.environ:
            time.sleep(60)  # VICTIM
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    dist.destroy_process_group()


main()
