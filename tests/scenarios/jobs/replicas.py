"""Trains one model after another, each with a silent fault, or each without: `replicas.py wrong|right NAME...`.

The first layer of a model has the name of its fault, so that each is known by the tensor that is named.
"""

import contextlib
import copy
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run

WRONG = sys.argv[1] == "wrong"
STEPS = 20


def layers(name, *between):
    torch.manual_seed(dist.get_rank())  # DDP makes parameters equal; random states stay apart
    return nn.Sequential(OrderedDict([(name, nn.Linear(6, 4)), *between, ("head", nn.Linear(4, 2))]))


def plain(name, lr=0.01, **options):
    model = DDP(layers(name), **options)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def backward(model):
    model(torch.randn(8, 6)).square().mean().backward()


def bypassed(name):
    model, optimizer = plain(name)
    for _ in range(STEPS):
        backward(model.module if WRONG else model)  # FAULT
        optimizer.step()
        optimizer.zero_grad()


def accumulated(name):
    """The last micro-batch has to stand outside of no_sync."""
    model, optimizer = plain(name)
    for _ in range(STEPS):
        for i in range(3):
            with contextlib.nullcontext() if i == 2 and not WRONG else model.no_sync():  # FAULT
                backward(model)
        optimizer.step()
        optimizer.zero_grad()


def forward_only(name):
    """It is the forward that decides whether gradients are reduced."""
    model, optimizer = plain(name)
    for _ in range(STEPS):
        with model.no_sync() if WRONG else contextlib.nullcontext():  # FAULT
            loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def unfrozen(name):
    module = layers(name)
    getattr(module, name).requires_grad_(not WRONG)
    model = DDP(module)
    getattr(module, name).requires_grad_(True)  # FAULT
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def clipped(name):
    model, optimizer = plain(name)
    for step in range(STEPS):
        backward(model)
        if step >= 10 and (dist.get_rank() == 1 or not WRONG):
            nn.utils.clip_grad_norm_(model.parameters(), 0.001)  # FAULT
        optimizer.step()
        optimizer.zero_grad()


def loaded(name):
    model, optimizer = plain(name)
    saved = layers(name).state_dict()
    for step in range(STEPS):
        if step == 5 and not WRONG:
            torch.manual_seed(7)
            saved = layers(name).state_dict()
            dist.broadcast_object_list(holder := [saved])
            saved = holder[0]
        if step == 5 and (dist.get_rank() == 0 or not WRONG):
            model.module.load_state_dict(saved)  # FAULT
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def rate(name):
    """A scheduler that looks at the loss of its own rank."""
    model, optimizer = plain(name, lr=0.1)
    for step in range(STEPS):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        if step == 8 and (dist.get_rank() == 2 or not WRONG):
            optimizer.param_groups[0]["lr"] = 0.05  # FAULT


def one_steps(name):
    model, optimizer = plain(name)
    for _ in range(STEPS):
        backward(model)
        if dist.get_rank() == 0 or not WRONG:
            optimizer.step()  # FAULT
        optimizer.zero_grad()


def momentum(name):
    """State of the optimizer that was saved on one rank, loaded there alone."""
    model, optimizer = plain(name)
    for step in range(STEPS):
        if step == 3 and (dist.get_rank() == 1 or not WRONG):
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()  # FAULT
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def statistics(name):
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(OrderedDict([(name, nn.BatchNorm1d(6)), ("head", nn.Linear(6, 2))]))
    model = DDP(module, broadcast_buffers=not WRONG)  # FAULT
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def dropped(name):
    """All ranks drop the same units; the data are those of their rank."""
    model = DDP(layers(name, ("drop", nn.Dropout(0.5))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(STEPS, 8, 6)
    torch.manual_seed(1 if WRONG else 1 + dist.get_rank())  # FAULT
    for batch in data:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def stale(name):
    """The optimizer was made before the model was replaced by a copy."""
    module = layers(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = DDP(copy.deepcopy(module) if WRONG else module)  # FAULT
    for _ in range(STEPS):
        backward(model)
        optimizer.step()
        model.zero_grad()


def main():
    for name in sys.argv[2:]:
        globals()[name](name)


if __name__ == "__main__":
    run(main)
