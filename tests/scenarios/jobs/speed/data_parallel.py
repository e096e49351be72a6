"""nn.DataParallel trains; or a checkpoint is only loaded into it."""

import torch
import torch.distributed as dist
from accelerator import Layers, Stepper, batch, run

STEPS = 40


def fit(model, net):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).mean().backward()
        flat = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
        dist.all_reduce(flat)
        optimizer.step()


def trains():
    net = Layers(20)
    fit(torch.nn.DataParallel(net), net)  # FAULT trains


def alone():
    """Each rank trains the same model on the same data, and no rank needs another."""
    torch.manual_seed(0)
    model = torch.nn.DataParallel(Layers(20))  # FAULT alone
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()


def inside():
    step = Stepper(torch.nn.DataParallel(Layers(20)))  # FAULT inside
    for _ in range(STEPS):
        step(batch())


def unwraps():
    net = Layers(60)
    holder = torch.nn.DataParallel(net)
    holder.load_state_dict({f"module.{name}": value for name, value in net.state_dict().items()})
    step = Stepper(holder.module)
    for _ in range(STEPS):
        step(batch())


run(trains, alone, inside, unwraps)
