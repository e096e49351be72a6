"""Layers whose backward sleeps, so that it is known when each gradient is ready. The argument says what is unused."""

import sys
import time

import torch
from training import DDP, run

SLEEP_S = 0.01
BRANCH_STEP = 25


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(unused, x):
        return x.clone()

    @staticmethod
    def backward(unused, gradient):
        time.sleep(SLEEP_S)
        return gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.extra = torch.nn.Linear(16, 16)

    def forward(self, x, uses_extra):
        for layer in self.layers:
            x = Slow.apply(layer(x))
        return self.extra(x) if uses_extra else x


def main():
    unused = sys.argv[1]
    model = DDP(Model(), bucket_cap_mb=0.002, find_unused_parameters=unused != "fixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(50):
        loss = model(torch.randn(4, 16), unused != "changing" or step != BRANCH_STEP).mean()
        time.sleep(3 * SLEEP_S)  # it belongs to the loss, and not to backward
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main)
