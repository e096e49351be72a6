"""One broadcast, gather and scatter is called from a line of its own on rank 0; find_unused_parameters."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left = torch.nn.Linear(8, 2)
        self.right = torch.nn.Linear(8, 2)

    def forward(self, x, which):
        return self.left(x) if which else self.right(x)


def choose(rank, step):
    if rank == 0:
        seed = torch.tensor([step])
        dist.broadcast(seed, src=0)
    else:
        seed = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(seed, src=0)
    return int(seed)


def spread(rank, world):
    mine = torch.zeros(3)
    if rank == 0:
        dist.scatter(mine, [torch.full((3,), float(i)) for i in range(world)])
    else:
        dist.scatter(mine)
    return mine


def collect(rank, world, mine):
    if rank == 0:
        parts = [torch.zeros(3) for _ in range(world)]
        dist.gather(mine, parts)
        return sum(parts)
    dist.gather(mine)
    return None


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(Branches(), find_unused_parameters=True)
    for step in range(30):
        seed = choose(rank, step)
        model(torch.randn(4, 8), (seed + rank) % 2).mean().backward()
        total = collect(rank, world, spread(rank, world))
        if rank == 0 and step % 10 == 0:
            print(step, total.sum().item())


run(main)
