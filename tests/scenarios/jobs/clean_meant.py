"""Trains models whose replicas differ on purpose for a while, or in parts, one after another."""

import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run

STEPS = 20


def model_of():
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model, optimizer, steps=STEPS, forward=None):
    for _ in range(steps):
        (forward or model)(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def join():
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with model.join():
        train(model, optimizer, 8 + 4 * dist.get_rank())


def ignored():
    module = model_of()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    model = DDP(module)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))


def allowed():
    """The run says --allow-different 'own.*'."""
    module = nn.Sequential()
    module.add_module("own", nn.Linear(6, 4))
    model = DDP(module)
    model.module.own.weight.data.fill_(dist.get_rank())
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))


def local_sgd():
    """Steps of each rank's own, and parameters that are averaged now and then."""
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        with model.no_sync():
            train(model, optimizer, 5)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def post_local_sgd():
    model = DDP(model_of())
    alone, _ = dist.new_subgroups(1)
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=4), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=4)
    train(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), averager))


def zero():
    model = DDP(model_of())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))


def reduced_by_hand():
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        model.module(torch.randn(8, 6)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def first_step_on_rank_0_alone():
    """It is made to quiet a scheduler's warning, and changes nothing; from then on numbers of steps are one apart."""
    model = DDP(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if dist.get_rank() == 0:
        optimizer.step()
    train(model, optimizer)


def best_weights():
    """Rank 0 loads the best weights once training is over, and evaluates them."""
    model = DDP(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, 10)
    best = copy.deepcopy(model.module.state_dict())
    train(model, optimizer, 10)
    if dist.get_rank() == 0:
        model.module.load_state_dict(best)
        model.eval()
        with torch.no_grad():
            model.module(torch.randn(8, 6))


def master_copies():
    """The optimizer holds copies in another precision, and no parameter of the model."""
    model = DDP(nn.Linear(6, 2).bfloat16())
    copies = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 6).bfloat16()).square().mean().backward()
        for own, parameter in zip(copies, model.parameters()):
            own.grad = parameter.grad.float()
        optimizer.step()
        for own, parameter in zip(copies, model.parameters()):
            parameter.data.copy_(own.data)


def main():
    for case in (
        join,
        ignored,
        allowed,
        local_sgd,
        post_local_sgd,
        zero,
        reduced_by_hand,
        first_step_on_rank_0_alone,
        best_weights,
        master_copies,
    ):
        case()


run(main)
