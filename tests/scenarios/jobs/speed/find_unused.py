"""find_unused_parameters is set and finds nothing; or a branch is left out now and then, or rarely."""

import torch
from accelerator import Layers, batch, run
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 70


class Branches(torch.nn.Module):
    """Many small tensors, one of whose two branches is used if ``choose`` says so."""

    def __init__(self, choose):
        super().__init__()
        self.trunk = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(150)))
        self.branches = torch.nn.ModuleList(torch.nn.Linear(16, 64) for _ in range(2))
        self.rest = Layers(15)
        self.choose = choose
        self.steps = 0

    def forward(self, x):
        x, step = self.trunk(x), self.steps
        self.steps += 1
        used = [branch for number, branch in enumerate(self.branches) if self.choose(step, number)]
        return self.rest(sum(branch(x) for branch in used))


def train(net):
    model = DDP(net, find_unused_parameters=True)  # FAULT
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch(16)).mean().backward()
        optimizer.step()


def all_used():
    train(Branches(lambda step, number: True))


def plain():
    train(torch.nn.Sequential(torch.nn.Linear(16, 64), Layers(15, count=40)))


def in_turn():
    train(Branches(lambda step, number: step % 2 == number))


def rarely():
    train(Branches(lambda step, number: number == 0 or step != 55))


run(all_used, plain, in_turn, rarely)
