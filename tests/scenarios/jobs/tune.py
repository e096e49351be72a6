"""Jobs for trials of settings: what changes the step, and what keeps a trial from its result.

The steps sleep, so that a busy machine changes little.
"""

import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "speed"))

import torch
import torch.distributed as dist
from accelerator import Layers, batch, run
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEP_MS = 20
SHORT_STEP_MS = 8
"""Of jobs that are launched many times."""
MANY = 100_000


class Branches(Layers):
    """A second branch, of which the last argument says from which step on it goes unused on rank 1."""

    def __init__(self):
        super().__init__(STEP_MS)
        self.rare = torch.nn.Linear(64, 64)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        is_left_out = dist.get_rank() == 1 and self.steps > int(sys.argv[2])
        return super().forward(x) if is_left_out else super().forward(x) + self.rare(x)


def loop(model, steps=MANY, each=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()
        if each is not None:
            each(step, model)


def wrap_with_slow_buffers(step_ms):
    """Return a model of which broadcasting buffers takes most of the step, as with a large table in a slow network."""
    original = DDP._sync_buffers

    def slow(self):
        time.sleep(5 * step_ms / 1000)
        original(self)

    DDP._sync_buffers = slow
    net = Layers(step_ms)
    net.register_buffer("table", torch.zeros(8))
    return DDP(net)


def slow_buffers():
    loop(wrap_with_slow_buffers(STEP_MS), each=save)


def hooked():
    """With a communication hook of the script's, nothing can be switched while the job runs."""
    model = wrap_with_slow_buffers(SHORT_STEP_MS)
    model.register_comm_hook(None, allreduce_hook)
    loop(model, each=save)


def picky():
    """Under one of the settings, the job fails."""
    model = wrap_with_slow_buffers(SHORT_STEP_MS)
    model.register_comm_hook(None, allreduce_hook)
    if model.static_graph:
        raise ValueError("this model has no static graph")
    loop(model, each=save)


def compiled():
    """So it is under torch.compile."""
    loop(torch.compile(wrap_with_slow_buffers(SHORT_STEP_MS), backend="eager"), each=save)


class Files(Dataset):
    """Each row takes 30 ms to read."""

    def __len__(self):
        return MANY

    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.full((64,), float(index))


def waits_for_files():
    model = DDP(Layers(STEP_MS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = Files()
    for rows in DataLoader(data, sampler=DistributedSampler(data, shuffle=False)):  # FAULT
        optimizer.zero_grad()
        model(rows).mean().backward()
        optimizer.step()


def save(step, model):
    """Save as many scripts do: under another name first."""
    path = sys.argv[2]
    torch.save(model.state_dict(), path + ".tmp")
    os.replace(path + ".tmp", path)


def healthy():
    loop(DDP(Layers(STEP_MS)))


def few():
    loop(DDP(Layers(STEP_MS)), 5)


def short():
    loop(DDP(Layers(STEP_MS)), 60)


def bare():
    loop(Layers(STEP_MS))


def two():
    loop(torch.nn.Sequential(DDP(Layers(STEP_MS)), DDP(Layers(STEP_MS))))


def unstepped():
    model = DDP(Layers(1))
    while True:
        model(batch()).mean().backward()


def crash():
    def fail(step, model):
        if step == 30 and dist.get_rank() == 1:
            raise ValueError("the label is out of range")

    loop(DDP(Layers(STEP_MS)), each=fail)


def search():
    loop(DDP(Branches(), find_unused_parameters=True))


def micro_batches():
    model = DDP(Layers(STEP_MS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(MANY):
        optimizer.zero_grad()
        for _ in range(3):
            model(batch()).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    run(
        slow_buffers, hooked, picky, compiled, waits_for_files, healthy, few, short, bare, two, unstepped, crash, search,
        micro_batches,
    )  # fmt: skip
