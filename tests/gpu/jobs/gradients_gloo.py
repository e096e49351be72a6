"""DDP over Gloo, both ranks on one GPU; with SEEDED=1 a gradient of rank 1 is NaN in the 7th backward."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(16, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4)).to("cuda:0")
    seen = 0

    def spoil(gradient):
        nonlocal seen
        seen += 1
        bad = os.environ["SEEDED"] == "1" and rank == 1 and seen == 7
        return gradient * float("nan") if bad else gradient

    net[2].weight.register_hook(spoil)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 16, device="cuda:0")).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
