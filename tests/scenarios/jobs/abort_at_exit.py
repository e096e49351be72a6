"""Trains well, and is aborted while the interpreter shuts down."""

import atexit
import os

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        atexit.register(os.abort)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
