"""Trains for as long as it is let, with a batch for each rank, or with one that all ranks share; or ends at once."""

import torch
import torch.distributed as dist
from accelerator import Layers, Stepper, run


def train(rows, steps=100_000):
    step = Stepper(Layers(30))
    for _ in range(steps):
        step(torch.randn(rows, 64))


def of_each_rank():
    train(8)


def of_all_ranks():
    train(8 // dist.get_world_size())


def short():
    train(8, steps=3)


run(of_each_rank, of_all_ranks, short)
