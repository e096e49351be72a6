"""All ranks wait for their input in each step; or a loader as slow costs nothing, since compute hides it."""

import time

import torch
import torch.distributed as dist
from accelerator import Layers, Stepper, run
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

BATCH = 5


class Files(Dataset):
    def __init__(self, read_ms, steps=40):
        self.seconds = read_ms / 1000
        self.count = steps * BATCH * dist.get_world_size()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.seconds)  # FAULT no_workers starved behind
        return torch.full((64,), float(index))


class Archive(Files):
    """Rows that a processor must unpack."""

    def __getitem__(self, index):
        until = time.thread_time() + 0.006
        while time.thread_time() < until:
            torch.arange(1000).sum()  # FAULT decodes
        return torch.full((64,), float(index))


class Stream(IterableDataset):
    """Each rank reads rows of its own."""

    def __iter__(self):
        for index in range(dist.get_rank(), 40 * BATCH * dist.get_world_size(), dist.get_world_size()):
            time.sleep(0.006)  # FAULT streams
            yield torch.full((64,), float(index))


def load(data, **options):
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False), **options)


def tokenize(rows):
    time.sleep(0.03)  # FAULT collates
    return torch.stack(rows)


def open_index(worker):
    time.sleep(0.15)  # FAULT restarted


def no_workers():
    step = Stepper(Layers(15))
    for rows in load(Files(6)):  # FAULT no_workers
        step(rows)


def streams():
    step = Stepper(Layers(15))
    for rows in DataLoader(Stream(), batch_size=BATCH):  # FAULT streams
        step(rows)


def collates():
    step = Stepper(Layers(15))
    for rows in load(Files(0), collate_fn=tokenize):  # FAULT collates
        step(rows)


def decodes():
    step = Stepper(Layers(15))
    for rows in load(Archive(0)):  # FAULT decodes
        step(rows)


def starved():
    step = Stepper(Layers(15))
    for rows in load(Files(8), num_workers=1):  # FAULT starved
        step(rows)


def behind():
    """Loaders are equally slow. Rank 0 is a little behind from its start, so the others wait for it in each step."""
    step = Stepper(Layers(12))
    loader = load(Files(16), num_workers=2)
    if dist.get_rank() == 0:
        time.sleep(0.04)
    for rows in loader:  # FAULT behind
        step(rows)


def restarted():
    step = Stepper(Layers(15))
    loader = load(Files(0, steps=6), num_workers=2, worker_init_fn=open_index)
    for _ in range(8):
        for rows in loader:  # FAULT restarted
            step(rows)


def cheap():
    step = Stepper(Layers(45))
    for rows in load(Files(0)):
        step(rows)


def hidden():
    step = Stepper(Layers(60))
    for rows in load(Files(4), num_workers=1):
        step(rows)


def persistent():
    step = Stepper(Layers(45))
    loader = load(Files(0.2, steps=10), num_workers=2, worker_init_fn=open_index, persistent_workers=True)
    for _ in range(5):
        for rows in loader:
            step(rows)


run(no_workers, streams, collates, decodes, starved, behind, restarted, cheap, hidden, persistent)
