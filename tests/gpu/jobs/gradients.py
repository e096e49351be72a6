"""DDP with both ranks on one GPU. With SEEDED=1 a gradient of rank 1 is NaN in the 7th backward.

OVER is the backend. With VIEWS=1 gradients are views of DDP's buckets, which are reduced in place.
"""

import os

import torch
import torch.distributed as dist
from place import BACKEND, DEVICE, SEEDED, join
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank = join(os.environ.get("OVER", BACKEND))
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(16, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4)).to(DEVICE)
    seen = 0

    def spoil(gradient):
        nonlocal seen
        seen += 1
        return gradient * float("nan") if SEEDED and rank == 1 and seen == 7 else gradient

    net[2].weight.register_hook(spoil)
    model = DDP(net, gradient_as_bucket_view=os.environ.get("VIEWS") == "1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 16, device=DEVICE)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
