"""Gradients are reduced at every micro-batch; or only at the last, or in models of their own."""

import torch
from accelerator import Layers, Stepper, batch, run

STEPS, PARTS, WIDTH = 20, 4, 1024


def net():
    return Layers(18, count=3, width=WIDTH)


def every_part():
    step = Stepper(net())
    for _ in range(STEPS):
        step.optimizer.zero_grad()
        for _ in range(PARTS):
            (step.model(batch(WIDTH)).mean() / PARTS).backward()  # FAULT every_part
        step.optimizer.step()


def forward_outside():
    """DDP decides in forward whether it reduces, so no_sync around backward alone changes nothing."""
    step = Stepper(net())
    for _ in range(STEPS):
        step.optimizer.zero_grad()
        for _ in range(PARTS - 1):
            loss = step.model(batch(WIDTH)).mean()
            with step.model.no_sync():
                loss.backward()  # FAULT forward_outside
        step.model(batch(WIDTH)).mean().backward()  # FAULT forward_outside
        step.optimizer.step()


def at_the_last():
    step = Stepper(net())
    for _ in range(STEPS):
        step.optimizer.zero_grad()
        with step.model.no_sync():
            for _ in range(PARTS - 1):
                step.model(batch(WIDTH)).mean().backward()
        step.model(batch(WIDTH)).mean().backward()
        step.optimizer.step()


def two_models():
    """A GAN: each model has a backward and an optimizer of its own in each step."""
    judge, maker = Stepper(net()), Stepper(net())
    for _ in range(STEPS):
        judge.optimizer.zero_grad()
        judge.model(maker.net(batch(WIDTH)).detach()).mean().backward()
        judge.optimizer.step()
        maker.optimizer.zero_grad()
        judge.net(maker.model(batch(WIDTH))).mean().backward()
        maker.optimizer.step()


run(every_part, forward_outside, at_the_last, two_models)
