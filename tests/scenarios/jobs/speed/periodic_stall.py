"""All ranks stop for something every few steps; or once, and briefly."""

import time

import torch
from accelerator import Layers, SlowDisk, Stepper, batch, run


def all_save():
    step = Stepper(Layers(20))
    for number in range(60):
        step(batch())
        if number % 10 == 9:
            torch.save(step.net.state_dict(), SlowDisk(0.15))  # FAULT all_save


def shuffle():
    time.sleep(0.2)  # FAULT epochs


def epochs():
    step = Stepper(Layers(20))
    for _ in range(6):
        shuffle()  # FAULT epochs
        for _ in range(12):
            step(batch())


def once():
    step = Stepper(Layers(30))
    for number in range(60):
        step(batch())
        if number == 40:
            torch.save(step.net.state_dict(), SlowDisk(0.04))


run(all_save, epochs, once)
