"""Rank 1 reduces a larger tensor than rank 0 under the same number, and both stand in item()."""

import torch
import torch.distributed as dist
from place import DEVICE, join


def main():
    rank = join()
    value, larger = torch.ones(4, device=DEVICE), torch.ones(2**22, device=DEVICE)
    for step in range(20):
        if rank == 1 and step == 10:
            dist.all_reduce(larger)  # FAULT
            larger.sum().item()
        else:
            dist.all_reduce(value)
            value.sum().item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
