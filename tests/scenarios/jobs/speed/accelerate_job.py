"""Accelerate that reduces at every micro-batch, although it could accumulate, or as it should be."""

import sys

import torch
from accelerate import Accelerator
from accelerator import Layers
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
PARTS, WIDTH = 4, 1024


def prepared(accelerator, ms):
    net = Layers(ms, count=3, width=WIDTH)
    data = TensorDataset(torch.randn(4 * 2 * 25 * PARTS, WIDTH))
    return accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), DataLoader(data, batch_size=4))


def every_part():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator, 18)
    for number, (rows,) in enumerate(loader):
        accelerator.backward(model(rows).mean() / PARTS)  # FAULT every_part
        if number % PARTS == PARTS - 1:
            optimizer.step()
            optimizer.zero_grad()
    model, optimizer = accelerator.free_memory(model, optimizer)  # see leave
    accelerator.end_training()


def accumulates():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model, optimizer, loader = prepared(accelerator, 90)
    for (rows,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).mean())
            optimizer.step()
            optimizer.zero_grad()
    model, optimizer = accelerator.free_memory(model, optimizer)  # see leave
    accelerator.end_training()


if __name__ == "__main__":
    {way.__name__: way for way in (every_part, accumulates)}[sys.argv[1]]()
