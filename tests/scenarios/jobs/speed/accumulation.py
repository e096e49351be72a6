"""Gradients are reduced at every micro-batch; or only at the last, or in models of their own."""

import torch
from accelerator import Layers, Stepper, batch, run

STEPS, PARTS, WIDTH = 30, 4, 1024


def net(ms=18, width=WIDTH):
    return Layers(ms, count=3, width=width)


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
    step = Stepper(net(30, 256))
    for _ in range(STEPS):
        step.optimizer.zero_grad()
        with step.model.no_sync():
            for _ in range(PARTS - 1):
                step.model(batch(256)).mean().backward()
        step.model(batch(256)).mean().backward()
        step.optimizer.step()


def two_models():
    """A GAN: each model has a backward and an optimizer of its own in each step."""
    judge, maker = (Stepper(net(60, 256)) for _ in range(2))
    for _ in range(STEPS):
        judge.optimizer.zero_grad()
        judge.model(maker.net(batch(256)).detach()).mean().backward()
        judge.optimizer.step()
        maker.optimizer.zero_grad()
        judge.net(maker.model(batch(256))).mean().backward()
        maker.optimizer.step()


run(every_part, forward_outside, at_the_last, two_models)
