"""All ranks wait for the lock of a build, before they meet."""

import sys

import torch.distributed as dist
from torch.utils.file_baton import FileBaton


def main():
    baton = FileBaton(sys.argv[1])
    if not baton.try_acquire():
        baton.wait()  # FAULT
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
