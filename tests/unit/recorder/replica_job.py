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

lasting = []
"""Models that last until the process group ends."""
made = []
"""Group and number within it of each model, as the recorder counts them."""


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


def trained(module, optimizer_of=sgd, steps=3, **options):
    """Return a model that was trained the ordinary way."""
    model = wrap(module, **options)
    train(model, optimizer_of(model), steps)
    return model


def by_gradients(make_gradients, module=None, **options):
    """Train a model whose gradients in each of three steps are made by a function."""
    model = wrap(module or mlp(), **options)
    optimizer = sgd(model)
    for _ in range(3):
        make_gradients(model)
        optimizer.step()


def by_closure(optimizer_of):
    model = wrap(mlp())
    optimizer = optimizer_of(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def accumulated(model):
    model.zero_grad()
    with model.no_sync():
        loss_of(model).backward()
    loss_of(model).backward()


def forward_only_in_no_sync(model):
    with model.no_sync():
        loss = loss_of(model)
    loss.backward()


def backward_twice(model):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def evaluated_between(model):
    model.eval()
    with torch.no_grad():
        model(torch.rand(3, 4))
    model.train()
    model.zero_grad()
    loss_of(model).backward()


def unused_parameters():
    module = mlp()
    module.spare = nn.Linear(2, 2)
    module.forward = module[0].forward
    trained(module, find_unused_parameters=True)


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


def one_optimizer_for_two_models():
    a, b = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    for _ in range(2):
        b(a(torch.rand(3, 4))).sum().backward()
        optimizer.step()


def several_optimizers(module, optimizers_of):
    model = wrap(module)
    optimizers = optimizers_of(model)
    for _ in range(2):
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()


def by_hand():
    model = wrap(mlp())
    for _ in range(6):
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None


def stale():
    optimizer = sgd(mlp())
    train(wrap(mlp()), optimizer, 5)


def replaced_head():
    module = mlp()
    optimizer = sgd(module)
    module[2] = nn.Linear(*reversed(module[2].weight.shape))
    train(wrap(module), optimizer, 5)


def left_out():
    """The rest is not to be trained; beside it something else of the same shapes is, which no other case has."""
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model, beside = wrap(module), nn.Linear(*reversed(module[2].weight.shape))
    optimizer = torch.optim.SGD([*module[0].parameters(), *beside.parameters()], lr=0.1)
    for _ in range(3):
        (loss_of(model) + beside(torch.rand(3, beside.in_features)).sum()).backward()
        optimizer.step()


def in_backward():
    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module)
    note(model)
    model._lazy_init_ran = True  # DDP's own reduction there does not go with the fake group
    model.register_comm_hook(None, as_it_is)
    for _ in range(3):
        loss_of(model).backward()


def in_hooks_of_gradients():
    model = wrap(mlp())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p, optimizer in optimizers.items():
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(3):
        loss_of(model).backward()


def ignored():
    module = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    trained(module)


def tied():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    trained(module)


def unfrozen():
    module = mlp()
    module[0].requires_grad_(requires_grad=False)
    model = wrap(module)
    optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
    train(model, optimizer, 3)
    module[0].requires_grad_()
    optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.01})
    train(model, optimizer, 1)


def compiled_around():
    model = wrap(mlp())
    train(torch.compile(model, backend="eager"), sgd(model))
    lasting.append(model)  # a model in a circle of references ends in silence


def compiled_step():
    model = wrap(mlp())
    compiled = torch.compile(sgd(model).step, backend="eager")
    for _ in range(3):
        loss_of(model).backward()
        compiled()


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


class Failing(torch.optim.SGD):
    def step(self):
        raise ArithmeticError


def step_that_raised():
    model = wrap(mlp())
    loss_of(model).backward()
    failing = Failing(model.parameters(), lr=0.1)
    with suppress(ArithmeticError):
        failing.step()
    train(model, sgd(model), 2)


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


def after_training(edit):
    model = trained(mlp())
    edit(model)


def clipped_after_each_step():
    model = wrap(mlp())
    optimizer = sgd(model)
    for _ in range(3):
        step(model, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-1, 1)


def made_again():
    for _ in range(2):
        trained(mlp(), steps=2)


def ended_by_an_error():
    def fail():
        model = wrap(mlp())
        try:
            train(model, sgd(model))
            raise ArithmeticError
        finally:
            del model

    with suppress(ArithmeticError):
        fail()


def never_trained():
    model = wrap(mlp())
    with torch.no_grad():
        loss_of(model)


def changing_rows():
    model = wrap(mlp())
    optimizer = sgd(model)
    for number in range(40):
        optimizer.state[model.module[0].weight][f"part {number}"] = torch.zeros(1)
        step(model, optimizer)


def wide_settings(model):
    groups = [{"params": [p], "lr": 0.1 / (i + 1), "label": "x" * 200} for i, p in enumerate(model.parameters())]
    return torch.optim.Adam(groups)


def alone():
    model = DistributedDataParallel(mlp(), process_group=dist.new_group([0]))
    model.register_comm_hook(None, as_it_is)
    train(model, sgd(model))


def in_join():
    model = wrap(mlp())
    optimizer = sgd(model)
    with suppress(Exception), Join([model]):  # the fake group has no answer to what joining asks at its end
        model._join_config = model._join_config._replace(enable=True)
        loss_of(model).backward()
        optimizer.step()
    optimizer.step()
    lasting.append(model)


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


CASES = {
    "ordinary": lambda: trained(normed(), lambda model: torch.optim.Adam(model.parameters(), lr=0.1), 9),
    "own_buffers": lambda: trained(normed(), broadcast_buffers=False),
    **{one.__name__: partial(by_gradients, one) for one in (accumulated, forward_only_in_no_sync, backward_twice)},
    "two_forwards_one_backward": lambda: by_gradients(
        lambda model: (loss_of(model) + loss_of(model)).backward(), find_unused_parameters=True
    ),
    "evaluated_between": lambda: by_gradients(evaluated_between, normed()),
    "static_graph_in_bucket_views": lambda: trained(
        mlp(), partial(sgd, momentum=0.9), static_graph=True, gradient_as_bucket_view=True
    ),
    "bypassed": lambda: by_gradients(lambda model: model.module(torch.rand(3, 4)).sum().backward()),
    "two_optimizers_for_one_model": lambda: several_optimizers(
        mlp(), lambda model: [sgd(model.module[0]), sgd(model.module[2], weight_decay=0.5)]
    ),
    "one_optimizer_for_each_parameter": lambda: several_optimizers(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))),
        lambda model: [torch.optim.SGD([p], lr=0.1) for p in model.parameters()],
    ),
    "compiled_within": lambda: trained(torch.compile(mlp(), backend="eager")),
    "sharded_optimizer": lambda: trained(
        mlp(), lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    ),
    "fused": lambda: trained(
        mlp(), lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)
    ),
    "closures": lambda: by_closure(sgd),
    "line_search": lambda: by_closure(lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3)),
    "nested": lambda: trained(mlp(), lambda model: Twofold(model.parameters(), lr=0.1), 2),
    "edited_after_training": lambda: after_training(lambda model: model.load_state_dict(model.state_dict())),
    "exchanged_after_training": lambda: after_training(
        lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    ),
    "halved_after_training": lambda: after_training(lambda model: model.half()),
    "wide_settings": lambda: trained(nn.Sequential(*(nn.Linear(4, 4) for _ in range(60))), wide_settings, 1),
    "sub_group": lambda: trained(mlp(), steps=2, process_group=dist.new_group([0, 2])),
}
"""Cases that are no functions of their names."""


def main():
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    models = {}
    for name in sys.argv[1:]:
        before = len(made)
        (CASES.get(name) or globals()[name])()
        models[name] = made[before:]
    print(json.dumps(models))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
