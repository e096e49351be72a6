"""Trains models as scripts do, each in a way of its own, in one process: torch's fake group stands for the others.

``python replica_job.py NAME...`` runs these cases and prints, as JSON, group and number of the models each has made.
"""

import json
import os
import sys
import threading
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

CASES = {}
lasting = []
"""Models that last until the process group ends."""
made = []
"""Group and number within it of each model, as the recorder counts them."""


def case(function):
    CASES[function.__name__] = function
    return function


def as_it_is(state, bucket):  # noqa: ARG001
    """Stand for a reduction: the fake group's own gives DDP nothing to go on with."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def wrap(module, **kwargs):
    model = DistributedDataParallel(module, **kwargs)
    model.register_comm_hook(None, as_it_is)
    note(model)
    return model


def note(model):
    group = model.process_group.group_name
    made.append((group, 1 + sum(name == group for name, _ in made)))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def normed():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.1, **kwargs)


def loss_of(model):
    return model(torch.rand(3, 4)).square().sum()


def step(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def train(model, optimizer, steps=3):
    for _ in range(steps):
        step(model, optimizer)


@case
def ordinary():
    model = wrap(normed())
    train(model, torch.optim.Adam(model.parameters(), lr=0.1), 9)


@case
def own_buffers():
    model = wrap(normed(), broadcast_buffers=False)
    train(model, sgd(model))


@case
def accumulated():
    model = wrap(mlp())
    optimizer = sgd(model)
    for _ in range(3):
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def forward_only_in_no_sync():
    model = wrap(mlp())
    optimizer = sgd(model)
    for _ in range(3):
        with model.no_sync():
            loss = loss_of(model)
        loss.backward()
        optimizer.step()


@case
def backward_twice():
    model = wrap(mlp())
    optimizer = sgd(model)
    for _ in range(3):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


@case
def two_forwards_one_backward():
    model = wrap(mlp(), find_unused_parameters=True)
    optimizer = sgd(model)
    for _ in range(3):
        (loss_of(model) + loss_of(model)).backward()
        optimizer.step()


@case
def evaluated_between():
    model = wrap(normed())
    optimizer = sgd(model)
    for _ in range(3):
        model.eval()
        with torch.no_grad():
            model(torch.rand(3, 4))
        model.train()
        step(model, optimizer)


@case
def unused_parameters():
    module = mlp()
    module.spare = nn.Linear(2, 2)
    module.forward = module[0].forward
    model = wrap(module, find_unused_parameters=True)
    train(model, sgd(model))


@case
def static_graph_in_bucket_views():
    model = wrap(mlp(), static_graph=True, gradient_as_bucket_view=True)
    train(model, sgd(model, momentum=0.9))


@case
def bypassed():
    model = wrap(mlp())
    optimizer = sgd(model)
    for _ in range(3):
        model.module(torch.rand(3, 4)).sum().backward()
        optimizer.step()


@case
def adversaries():
    maker, judge = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 1))
    first, second = sgd(judge), sgd(maker)
    for _ in range(3):
        first.zero_grad()
        judge(maker(torch.rand(3, 4)).detach()).sum().backward()
        first.step()
        second.zero_grad()
        judge(maker(torch.rand(3, 4))).sum().backward()
        second.step()


@case
def one_optimizer_for_two_models():
    a, b = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    for _ in range(2):
        b(a(torch.rand(3, 4))).sum().backward()
        optimizer.step()


@case
def two_optimizers_for_one_model():
    model = wrap(mlp())
    halves = [sgd(model.module[0]), sgd(model.module[2], weight_decay=0.5)]
    for _ in range(2):
        loss_of(model).backward()
        for optimizer in halves:
            optimizer.step()


@case
def one_optimizer_for_each_parameter():
    model = wrap(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))))
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    for _ in range(2):
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()


@case
def by_hand():
    model = wrap(mlp())
    for _ in range(6):
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None


@case
def stale():
    old = mlp()
    optimizer = sgd(old)
    model = wrap(mlp())
    train(model, optimizer, 5)


@case
def replaced_head():
    module = mlp()
    optimizer = sgd(module)
    module[2] = nn.Linear(*reversed(module[2].weight.shape))
    train(wrap(module), optimizer, 5)


@case
def left_out():
    """The rest is not to be trained; beside it something else of the same shapes is, which no other case has."""
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model, beside = wrap(module), nn.Linear(*reversed(module[2].weight.shape))
    optimizer = torch.optim.SGD([*module[0].parameters(), *beside.parameters()], lr=0.1)
    for _ in range(3):
        (loss_of(model) + beside(torch.rand(3, beside.in_features)).sum()).backward()
        optimizer.step()


@case
def in_backward():
    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module)
    note(model)
    model._lazy_init_ran = True  # DDP's own reduction there does not go with the fake group
    model.register_comm_hook(None, as_it_is)
    for _ in range(3):
        loss_of(model).backward()


@case
def in_hooks_of_gradients():
    model = wrap(mlp())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p, optimizer in optimizers.items():
        p.register_post_accumulate_grad_hook(partial(_step_at_once, optimizer))
    for _ in range(3):
        loss_of(model).backward()


def _step_at_once(optimizer, _parameter):
    optimizer.step()


@case
def ignored():
    module = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    model = wrap(module)
    train(model, sgd(model))


@case
def tied():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    model = wrap(module)
    train(model, sgd(model))


@case
def unfrozen():
    module = mlp()
    module[0].requires_grad_(requires_grad=False)
    model = wrap(module)
    optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
    train(model, optimizer, 3)
    module[0].requires_grad_()
    optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.01})
    train(model, optimizer, 1)


@case
def compiled_around():
    model = wrap(mlp())
    optimizer = sgd(model)
    train(torch.compile(model, backend="eager"), optimizer)
    lasting.append(model)  # a model in a circle of references ends in silence


@case
def compiled_within():
    model = wrap(torch.compile(mlp(), backend="eager"))
    train(model, sgd(model))


@case
def compiled_step():
    model = wrap(mlp())
    optimizer = sgd(model)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        loss_of(model).backward()
        compiled()


@case
def sharded_optimizer():
    model = wrap(mlp())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1))


@case
def fused():
    model = wrap(mlp())
    train(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True))


@case
def closures():
    model = wrap(mlp())
    optimizer = sgd(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


@case
def line_search():
    model = wrap(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


@case
def in_two_threads():
    """One thread's step begins and ends while another makes its own."""
    first, second = wrap(mlp()), wrap(mlp())
    outer, inner = sgd(first), sgd(second)

    def closure():
        other = threading.Thread(target=step, args=(second, inner))
        other.start()
        other.join()
        return loss_of(first).backward()

    for _ in range(2):
        outer.step(closure)


class Twofold(torch.optim.SGD):
    """Steps twice by another optimizer, as sharpness-aware ones do."""

    def step(self):
        inner = torch.optim.SGD(self.param_groups, lr=0.1)
        inner.step()
        inner.step()


@case
def nested():
    model = wrap(mlp())
    train(model, Twofold(model.parameters(), lr=0.1), 2)


class Failing(torch.optim.SGD):
    def step(self):
        raise ArithmeticError


@case
def step_that_raised():
    model = wrap(mlp())
    loss_of(model).backward()
    failing = Failing(model.parameters(), lr=0.1)
    with suppress(ArithmeticError):
        failing.step()
    train(model, sgd(model), 2)


@case
def scaled():
    model = wrap(mlp())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for spoiled in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if spoiled:
            model.module[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()


@case
def edited_after_training():
    model = wrap(mlp())
    train(model, sgd(model))
    model.load_state_dict(model.state_dict())


@case
def exchanged_after_training():
    model = wrap(mlp())
    train(model, sgd(model))
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


@case
def halved_after_training():
    model = wrap(mlp())
    train(model, sgd(model))
    model.half()


@case
def clipped_after_each_step():
    model = wrap(mlp())
    optimizer = sgd(model)
    for _ in range(3):
        step(model, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-1, 1)


@case
def made_again():
    for _ in range(2):
        model = wrap(mlp())
        train(model, sgd(model), 2)
        del model


@case
def ended_by_an_error():
    with suppress(ArithmeticError):
        _fail_in_training()


def _fail_in_training():
    model = wrap(mlp())
    try:
        train(model, sgd(model))
        raise ArithmeticError
    finally:
        del model


@case
def never_trained():
    model = wrap(mlp())
    with torch.no_grad():
        loss_of(model)


@case
def changing_rows():
    model = wrap(mlp())
    optimizer = sgd(model)
    for number in range(40):
        optimizer.state[model.module[0].weight][f"part {number}"] = torch.zeros(1)
        step(model, optimizer)


@case
def wide_settings():
    model = wrap(nn.Sequential(*(nn.Linear(4, 4) for _ in range(60))))
    groups = [{"params": [p], "lr": 0.1 / (i + 1), "label": "x" * 200} for i, p in enumerate(model.parameters())]
    train(model, torch.optim.Adam(groups), 1)


@case
def alone():
    group = dist.new_group([0])
    model = DistributedDataParallel(mlp(), process_group=group)
    model.register_comm_hook(None, as_it_is)
    train(model, sgd(model))


@case
def sub_group():
    model = wrap(mlp(), process_group=dist.new_group([0, 2]))
    train(model, sgd(model), 2)


@case
def in_join():
    model = wrap(mlp())
    optimizer = sgd(model)
    with suppress(Exception), Join([model]):  # the fake group has no answer to what joining asks at its end
        model._join_config = model._join_config._replace(enable=True)
        loss_of(model).backward()
        optimizer.step()
    optimizer.step()
    lasting.append(model)


@case
def in_a_fork():
    model = wrap(mlp())
    optimizer = sgd(model)
    train(model, optimizer, 1)
    child = os.fork()
    if child == 0:
        optimizer.step()
        del model, optimizer
        os._exit(0)
    os.waitpid(child, 0)
    train(model, optimizer, 1)


@case
def as_before():
    """Leave numerics, random numbers, graphs and version counters as they are without the recorder."""
    torch.manual_seed(3)
    model = wrap(normed())
    optimizer = sgd(model, momentum=0.9)
    versions = []
    for _ in range(3):
        step(model, optimizer)
        versions += [p._version for p in model.parameters()]
    total = sum(p.double().sum() for p in model.parameters()).item()
    print("numerics", total, versions, torch.rand(1).item(), file=sys.stderr)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    models = {}
    for name in sys.argv[1:]:
        before = len(made)
        CASES[name]()
        models[name] = made[before:]
    print(json.dumps(models))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
