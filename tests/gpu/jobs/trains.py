"""DDP trains a small network with batch norm until its loss has fallen. Nothing is wrong.

With DROPOUT the network also drops that part of its units, and with SEEDED=1 all ranks drop the same ones.
"""

import os

import torch
import torch.distributed as dist
from place import DEVICE, SEEDED, join, leave
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank = join()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )
    if "DROPOUT" in os.environ:
        net.insert(3, torch.nn.Dropout(float(os.environ["DROPOUT"])))
    model = DDP(net.to(DEVICE))
    if not SEEDED:
        torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    given = torch.randn(32, 16, generator=generator).to(DEVICE)
    labels = torch.randint(4, (32,), generator=generator).to(DEVICE)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(given), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        leave({"losses": losses})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
