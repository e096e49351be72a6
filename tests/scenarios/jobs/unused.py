"""A model with a part that a backward leaves out on one rank; DDP knows of it (find_unused_parameters), or does not."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HOW = sys.argv[1]
STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.extra = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, with_extra: bool) -> torch.Tensor:
        hidden = self.body(x)
        return self.head(hidden) + (self.extra(hidden) if with_extra else 0)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), find_unused_parameters=HOW == "set")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8), not (dist.get_rank() == 1 and step == 3)).sum()
        loss.backward()
        optimizer.step()
        if HOW == "logged":
            dist.all_reduce(loss.detach())
    del model  # see training.leave
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
