"""Models that no DDP holds, one after another, each done wrong or right; the first layer has the name of its fault."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WRONG = sys.argv[1] == "wrong"
STEPS = 8


def seed() -> None:
    """Make what comes next the same on all ranks, or not."""
    torch.manual_seed(dist.get_rank() if WRONG else 0)


def data() -> Tensor:
    return torch.randn(4, 8) + dist.get_rank()


def averaged() -> None:
    seed()
    averaged = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(averaged.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        averaged(data()).pow(2).mean().backward()
        for parameter in averaged.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def critic() -> None:
    torch.manual_seed(0)
    actor = DistributedDataParallel(nn.Linear(8, 8))
    critic: nn.Module = nn.Linear(8, 1)
    if not WRONG:
        critic = DistributedDataParallel(critic)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (actor, critic))
    for _ in range(STEPS):
        second.zero_grad()
        critic(data()).pow(2).mean().backward()
        second.step()
        first.zero_grad()
        critic(actor(data())).mean().backward()
        first.step()


def head() -> None:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("body", nn.Linear(8, 8))
    net.add_module("head", nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.head = nn.Linear(8, 2)
    if not WRONG:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net)
    for _ in range(STEPS):
        model.zero_grad()
        model(data()).pow(2).mean().backward()
        optimizer.step()


def own() -> None:
    """Train what each rank is meant to have for itself: a head of its own behind DDP, and a model beside it."""
    torch.manual_seed(0)
    body = DistributedDataParallel(nn.Linear(8, 8))
    torch.manual_seed(dist.get_rank())
    own, alone = nn.Linear(8, 4), nn.Linear(8, 4)
    optimizer = torch.optim.SGD([*body.parameters(), *own.parameters()], lr=0.1)
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        own(body(data())).pow(2).mean().backward()
        optimizer.step()
        other.zero_grad()
        alone(data()).pow(2).mean().backward()
        other.step()


def main() -> None:
    dist.init_process_group("gloo")
    every: dict[str, Callable[[], None]] = {"averaged": averaged, "critic": critic, "head": head, "own": own}
    for name in sys.argv[2:]:
        torch.manual_seed(dist.get_rank())
        every[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
