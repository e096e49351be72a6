"""Rank 1 waits for a message that rank 0 sends only after a reduction for which it waits for rank 1."""

import torch
import torch.distributed as dist
from place import DEVICE, join


def main():
    rank = join()
    ones = torch.ones(4, device=DEVICE)
    dist.all_reduce(ones)
    if rank == 0:
        dist.send(ones, dst=1)
        ones.sum().item()
        dist.all_reduce(ones)  # FAULT
        ones.sum().item()
        dist.send(ones, dst=1)
    else:
        dist.recv(ones, src=0)
        ones.sum().item()
        dist.recv(ones, src=0)  # FAULT
        ones.sum().item()
        dist.all_reduce(ones)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
