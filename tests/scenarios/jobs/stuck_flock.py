"""Rank 0 keeps a lock on a file and goes into a collective; rank 1 wants the lock first."""

import fcntl
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    cache = open(sys.argv[1], "w")  # noqa: SIM115 - held for as long as the job lives
    if dist.get_rank() == 0:
        fcntl.flock(cache, fcntl.LOCK_EX)
    dist.barrier()
    if dist.get_rank() == 1:
        fcntl.flock(cache, fcntl.LOCK_EX)  # FAULT
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
