"""Buffers of many MiB go out from rank 0 in each forward; or they are small, or stay where they are."""

import torch
from accelerator import Layers, Stepper, batch, run

STEPS = 40


class Masked(Layers):
    """Carries a table that never changes."""

    def __init__(self, size, **options):
        super().__init__(30)
        self.register_buffer("mask", torch.ones(size, size).tril(), **options)

    def forward(self, x):
        return super().forward(x * self.mask[0, 0])


class Remembers(Layers):
    """Keeps what it has seen, as a queue of negatives."""

    def __init__(self):
        super().__init__(30)
        self.register_buffer("queue", torch.zeros(60_000, 64))

    def forward(self, x):
        self.queue[: len(x)] = x.detach()
        return super().forward(x)


def train(net, **options):
    step = Stepper(net, **options)
    for _ in range(STEPS):
        step(batch())


def mask():
    train(Masked(2500, persistent=False))


def queue():
    train(Remembers())


def norms():
    train(torch.nn.Sequential(*(torch.nn.BatchNorm1d(64) for _ in range(4)), Layers(60)))


def kept():
    train(Masked(2500), broadcast_buffers=False)


run(mask, queue, norms, kept)
