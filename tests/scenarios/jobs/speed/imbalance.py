"""Ranks take turns in having the most work, since inputs differ in size; or sizes differ from step to step alone."""

import random

import torch
import torch.distributed as dist
from accelerator import Stepper, Work, run

STEPS = 50


class PerToken(torch.nn.Module):
    """Takes a time in proportion to the number of tokens, which is the second dimension."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return Work.apply(self.layer(x), x.shape[1] * 0.0001)


class PerImage(PerToken):
    def forward(self, images):
        return Work.apply(self.layer(images), len(images) * 0.001)


def own_sizes():
    return random.Random(7 + dist.get_rank())


def lengths():
    step, sizes = Stepper(PerToken()), own_sizes()
    for _ in range(STEPS):
        step(torch.randn(4, sizes.randint(20, 400), 16))


def crops():
    step, sizes = Stepper(PerImage()), own_sizes()
    for _ in range(STEPS):
        step(torch.randn(sizes.choice((4, 8, 30)), 16))


def sorted_by_length():
    step, sizes = Stepper(PerToken()), random.Random(1)
    for _ in range(STEPS):
        step(torch.randn(4, sizes.randint(150, 400), 16))


def nearly_even():
    step, sizes = Stepper(PerToken()), own_sizes()
    for _ in range(STEPS):
        step(torch.randn(4, sizes.randint(295, 305), 16))


run(lengths, crops, sorted_by_length, nearly_even)
