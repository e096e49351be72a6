"""Ranks that reduce in small steps for as long as the network lets them."""

import pathlib
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    for step in range(10**9):
        dist.all_reduce(torch.ones(256))  # FAULT
        if step == 50 and dist.get_rank() == 0:
            pathlib.Path(sys.argv[1]).touch()


if __name__ == "__main__":
    main()
