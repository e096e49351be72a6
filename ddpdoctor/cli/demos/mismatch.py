"""Rank 2 calls broadcast where ranks 0 and 1 call all_reduce."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def share_loss(loss, step):
    value = loss.detach().clone()
    if dist.get_rank() == 2 and step == 5:
        dist.broadcast(value, src=2)  # the fault: the others average
    else:
        dist.all_reduce(value)
    return value / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        share_loss(loss, step)
    del model  # a model that outlives its group can deadlock with a thread of the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
