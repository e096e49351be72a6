"""Buckets are too small, or leave when backward is over; or they are as they should be."""

import torch
from accelerator import Layers, Stepper, batch, run


class Deep(torch.nn.Module):
    """Many small tensors: ``count`` layers of weight and bias."""

    def __init__(self, ms, count):
        super().__init__()
        self.small = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(count)))
        self.rest = Layers(ms)

    def forward(self, x):
        return self.rest(torch.cat([self.small(x)] * 4, 1))


def train(net, width=16, steps=40, **options):
    step = Stepper(net, **options)
    for _ in range(steps):
        step(batch(width))


def one_for_each_tensor():
    train(Deep(20, 120), bucket_cap_mb=0.0001)


def few_kib():
    train(Layers(20, count=300, width=16), 16, steps=25, bucket_cap_mb=0.0005)


def default():
    """16 MiB: the default of 1 MiB and then 25 keeps nearly all of them until backward is over."""
    train(Layers(200, count=16, width=512), 512)


def of_1_mib():
    train(Layers(400, count=16, width=512), 512, bucket_cap_mb=1)


def one_for_all():
    """64 MiB, of which DDP's default would reduce most while backward computes."""
    train(Layers(200, count=16, width=1024), 1024, steps=25, bucket_cap_mb=1000)


def many_tensors():
    train(Deep(60, 120))


run(one_for_each_tensor, few_kib, default, of_1_mib, one_for_all, many_tensors)
