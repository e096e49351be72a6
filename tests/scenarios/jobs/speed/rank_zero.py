"""Rank 0 does something now and then for which the others wait; or it does so seldom, or all share the work."""

import time

import torch
import torch.distributed as dist
from accelerator import Layers, SlowDisk, Stepper, batch, run

STEPS = 60


def train(now_and_then, every, ranks=(0,)):
    step = Stepper(Layers(20))
    for number in range(STEPS):
        step(batch())
        if number % every == every - 1 and dist.get_rank() in ranks:
            now_and_then(step.net)  # FAULT evaluates saves logs


def accuracy(net, batches):
    net.eval()
    with torch.no_grad():
        for _ in range(batches):
            net(batch())  # FAULT evaluates
    net.train()


def evaluates():
    train(lambda net: accuracy(net, 18), every=8)


def saves():
    train(lambda net: torch.save(net.state_dict(), SlowDisk(0.15)), every=10)  # FAULT saves


def logs():
    def upload(net):
        time.sleep(0.07)  # FAULT logs

    train(upload, every=5)


def draws():
    """In a hook of the model."""
    drawn = 0

    def draw(*_):
        nonlocal drawn
        drawn += 1
        if drawn % 8 == 0 and dist.get_rank() == 0:
            time.sleep(0.15)  # FAULT draws

    step = Stepper(Layers(20))
    step.net.register_forward_hook(draw)
    for _ in range(STEPS):
        step(batch())


def saves_once():
    train(lambda net: torch.save(net.state_dict(), SlowDisk(0.04)), every=50)


def prints():
    train(lambda net: print("loss", net.seconds), every=5)


def all_evaluate():
    train(lambda net: accuracy(net, 3), every=20, ranks=range(dist.get_world_size()))


run(evaluates, saves, logs, draws, saves_once, prints, all_evaluate)
