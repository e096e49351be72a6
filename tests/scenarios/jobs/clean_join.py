"""Uneven inputs under join."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 2))
    with model.join():
        for _ in range(20 + 5 * dist.get_rank()):
            model(torch.randn(4, 8)).mean().backward()
    dist.barrier()
    del model  # freed after the group, it can deadlock with a thread of Gloo that has yet to free a tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
