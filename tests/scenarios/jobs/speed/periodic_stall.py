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


def evaluate(model):
    model.eval()
    with torch.no_grad():
        for _ in range(18):
            model(batch())  # FAULT all_evaluate
    model.train()


def all_evaluate():
    """Each rank evaluates all of the data, in the DDP model."""
    step = Stepper(Layers(20))
    for number in range(64):
        step(batch())
        if number % 8 == 7:
            evaluate(step.model)  # FAULT all_evaluate


def once():
    step = Stepper(Layers(30))
    for number in range(60):
        step(batch())
        if number == 40:
            torch.save(step.net.state_dict(), SlowDisk(0.04))


run(all_save, epochs, all_evaluate, once)
