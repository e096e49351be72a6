"""Rank 1 is slow in each step for one of many reasons; or ranks differ a little, at the start, or once."""

import gc
import random
import time

import torch
import torch.distributed as dist
from accelerator import Layers, SlowDisk, Stepper, Work, batch, run
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS = 40
EXTRA_S = 0.04


def is_slow():
    return dist.get_rank() == 1


class Images(Dataset):
    def __len__(self):
        return 4 * STEPS * dist.get_world_size()

    def __getitem__(self, index):
        if is_slow():
            time.sleep(EXTRA_S / 4)  # FAULT reads
        return torch.randn(64)


class PerRow(torch.nn.Module):
    """Takes 2 ms a row in forward and 4 in backward."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return Work.apply(self.layer(x), 0.002 * len(x))


class Attention(Layers):
    def forward(self, x):
        if is_slow():
            time.sleep(EXTRA_S)  # FAULT attends
        return super().forward(x)


class Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if is_slow():
            time.sleep(EXTRA_S)  # FAULT differentiates
        return gradient


class Penalized(Layers):
    def forward(self, x):
        return Penalty.apply(super().forward(x))


def train(each_step=lambda: None, net=None):
    step = Stepper(net or Layers(30))
    for _ in range(STEPS):
        step(batch())
        if is_slow():
            each_step()  # FAULT collects saves logs evaluates
    return step


def reads():
    step = Stepper(Layers(30))
    data = Images()
    for rows in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):  # FAULT reads
        step(rows)


def larger_batch():
    step = Stepper(PerRow())
    rows = 12 if is_slow() else 4
    for _ in range(STEPS):
        step(torch.randn(rows, 64))


def attends():
    train(net=Attention(30))


def differentiates():
    train(net=Penalized(30))


def collects():
    gc.freeze()
    heap = [[i] for i in range(150_000)]
    train(lambda: gc.collect())  # FAULT collects
    del heap


def saves():
    net = Layers(30)
    train(lambda: torch.save(net.state_dict(), SlowDisk(EXTRA_S)), net)  # FAULT saves


def logs():
    def send():
        time.sleep(EXTRA_S)  # FAULT logs

    train(send)


def evaluates():
    held_out = Layers(360)

    @torch.no_grad()
    def evaluate():
        held_out(batch()[:1])  # FAULT evaluates

    held_out.seconds = EXTRA_S / 4
    train(evaluate)


def jitter():
    own = random.Random(dist.get_rank())
    step = Stepper(Layers(60))
    for _ in range(STEPS):
        time.sleep(0.002 * own.random())
        step(batch())


def warms_up():
    step = Stepper(Layers(45))
    for number in range(60):
        if number < 4 and is_slow():
            time.sleep(0.1)
        step(batch())


def pauses():
    step = Stepper(Layers(45))
    for number in range(80):
        if number == 40 and is_slow():
            time.sleep(0.15)
        step(batch())


run(reads, larger_batch, attends, differentiates, collects, saves, logs, evaluates, jitter, warms_up, pauses)
