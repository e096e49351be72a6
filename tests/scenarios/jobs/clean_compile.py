"""torch.compile around DDP with a static graph and activation checkpointing."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from training import loop


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def main():
    dist.init_process_group("gloo")
    loop(DDP(Net(), static_graph=True), steps=20)
    loop(torch.compile(DDP(torch.nn.Linear(8, 2))), steps=10)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
