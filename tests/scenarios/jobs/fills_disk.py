"""Fills the disk that its run folder is on, and then hangs."""

import os
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def fill(path):
    try:
        with open(path, "wb") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()
    except OSError:
        pass


def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        fill(os.environ["FILL"])
    dist.barrier()
    while dist.get_rank() == 1:
        time.sleep(1000)  # FAULT
    dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main()
