"""Matrices are multiplied by more threads than there are cores; or by one each, or the threads have nothing to do."""

import os

import torch
from accelerator import Layers, Stepper, batch, run

STEPS = 25


class Matrices(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


def multiply(threads):
    torch.set_num_threads(threads)
    step = Stepper(Matrices(256))
    for _ in range(STEPS):
        step(torch.randn(4096, 256))


def all_cores_each():
    multiply(len(os.sched_getaffinity(0)))


def of_a_large_machine():
    multiply(32)


def one_each():
    multiply(1)


def idle():
    torch.set_num_threads(16)
    step = Stepper(Layers(60))
    for _ in range(STEPS):
        step(batch())


run(all_cores_each, of_a_large_machine, one_each, idle)
