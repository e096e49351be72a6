"""Point-to-point calls of all forms among some ranks, with collectives of all between them, two models, destroy."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


def exchange(rank):
    if rank == 0:
        dist.send(torch.full((3,), 7.0), 1, tag=5)
        dist.isend(torch.ones(2, dtype=torch.complex64), dst=2).wait()
    elif rank == 1:
        got = torch.zeros(3)
        assert dist.recv(got, tag=5) == 0
        assert got.tolist() == [7.0, 7.0, 7.0]
    else:
        got = torch.zeros(2, dtype=torch.complex64)
        work = dist.irecv(got, src=0)
        work.wait()
        assert got.sum() == 2


def ring(rank, world):
    out, back = torch.tensor([float(rank)]), torch.zeros(1)
    ops = [dist.P2POp(dist.isend, out, (rank + 1) % world), dist.P2POp(dist.irecv, back, (rank - 1) % world)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert back.item() == (rank - 1) % world


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(torch.nn.Linear(8, 2))
    for step in range(10):
        exchange(rank)
        if step % 2:
            ring(rank, world)
        model(torch.randn(4, 8)).mean().backward()
        dist.all_reduce(torch.ones(4))


run(main)
