"""Gradients are so large that no bucket size hides their reduction; or they are hidden, or accumulated first."""

import torch
from accelerator import Layers, Stepper, Work, batch, run

STEPS = 25


class Head(torch.nn.Module):
    """One matrix holds nearly all parameters, and its gradient is ready first."""

    def __init__(self, width):
        super().__init__()
        self.matrix = torch.nn.Linear(64, width, bias=False)

    def forward(self, x):
        return Work.apply(self.matrix(x), 0.003)


class Words(torch.nn.Module):
    """A table whose dense gradient is ready last."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(250_000, 64)
        self.rest = Layers(15)

    def forward(self, x):
        return self.rest(self.table(x))


def head():
    step = Stepper(Head(250_000))
    for _ in range(STEPS):
        step(batch())


def table():
    step = Stepper(Words())
    for _ in range(STEPS):
        step(torch.arange(8))


def wide():
    """16 MiB in layers of 1 MiB: far too much for a slow network."""
    step = Stepper(Layers(20, count=16, width=512))
    for _ in range(STEPS):
        step(batch(512))


def overlapped():
    step = Stepper(Layers(120, count=12, width=128))
    for _ in range(STEPS):
        step(batch(128))


def accumulated():
    """The reduction of a large gradient pays off over the micro-batches before it."""
    step = Stepper(Layers(12, count=4, width=512))
    for _ in range(STEPS):
        with step.model.no_sync():
            for _ in range(15):
                step.model(batch(512)).mean().backward()
        step(batch(512))


run(head, table, wide, overlapped, accumulated)
