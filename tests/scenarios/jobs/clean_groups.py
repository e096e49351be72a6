"""Two groups with different numbers of collectives, point-to-point, asynchronous calls, a root."""

import torch
import torch.distributed as dist
from training import run


def main():
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    for _ in range(30):
        if rank < 2:
            dist.all_reduce(torch.ones(4), group=pair)
        if rank == 0:
            dist.send(torch.ones(2), 2)
            dist.broadcast(torch.ones(3), src=0)
        else:
            if rank == 2:
                dist.recv(torch.zeros(2), 0)
            dist.broadcast(torch.zeros(3), src=0)
        work = dist.all_reduce(torch.ones(8), async_op=True)
        work.wait()
        dist.broadcast_object_list([rank], src=1)


run(main)
