"""Jobs that are merely small, or slow at their start, or stopped once."""

import time

import torch
from accelerator import Layers, Stepper, batch, run


def small():
    step = Stepper(torch.nn.Linear(64, 64))
    for _ in range(200):
        step(batch())


def normalized():
    step = Stepper(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)))
    for _ in range(200):
        step(batch())


def warms_up():
    step = Stepper(Layers(45))
    for number in range(60):
        if number < 4:
            time.sleep(0.2)
        step(batch())


def pauses():
    step = Stepper(Layers(45))
    for number in range(80):
        if number == 40:
            time.sleep(1)
        step(batch())


def short():
    """Too few steps to say anything of their time."""
    step = Stepper(Layers(20))
    for _ in range(5):
        step(batch())


run(small, normalized, warms_up, pauses, short)
