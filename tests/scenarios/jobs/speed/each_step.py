"""Collectives of the script's own cost time in each step; or they are cheap, or rare."""

import torch
import torch.distributed as dist
from accelerator import Layers, Stepper, batch, run

STEPS = 40


def train(ms, each_step):
    step = Stepper(Layers(ms))
    for number in range(STEPS):
        step(batch())
        each_step(number)


def gathers():
    """All outputs of all ranks, for a metric."""
    own = torch.randn(3_000_000)
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    train(20, lambda step: dist.all_gather(others, own))  # FAULT gathers


def many_metrics():
    metrics = [torch.ones(()) for _ in range(100)]

    def reduce(step):
        for metric in metrics:
            dist.all_reduce(metric)  # FAULT many_metrics
            metric.fill_(1)

    train(20, reduce)


def objects():
    rows = [{"id": i, "text": "word " * 40} for i in range(20_000)]
    train(20, lambda step: dist.all_gather_object([None] * dist.get_world_size(), rows))  # FAULT objects


def pickles():
    """Little is sent, but it is many small objects, and to pickle them takes most of the call."""
    rows = [{"id": i, "score": i / 2} for i in range(40_000)]
    train(20, lambda step: dist.all_gather_object([None] * dist.get_world_size(), rows))  # FAULT pickles


def meets():
    train(60, lambda step: dist.barrier())


def averages_the_loss():
    train(60, lambda step: dist.all_reduce(torch.ones(())))


def every_20():
    own = torch.randn(1_000_000)
    train(60, lambda step: step % 20 == 19 and dist.all_reduce(own))


run(gathers, many_metrics, objects, pickles, meets, averages_the_loss, every_20)
