"""Ranks that do not do or hold the same: each function is a job, and its name is the argument."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from training import run


def mismatch_shape():
    """One rank reduces a tensor of another shape."""

    def sync(rank):
        sums = torch.ones(5 if rank == 2 else 4)
        dist.all_reduce(sums)  # FAULT

    def main():
        for step in range(40):
            dist.all_reduce(torch.ones(16))
            if step == 20:
                sync(dist.get_rank())

    run(main)


def mismatch_operation():
    """One rank broadcasts where the others reduce."""

    def sync(rank):
        value = torch.ones(4)
        if rank == 1:
            dist.broadcast(value, src=1)  # FAULT
        else:
            dist.all_reduce(value)

    def main():
        for step in range(40):
            dist.all_reduce(torch.ones(16))
            if step == 20:
                sync(dist.get_rank())

    run(main)


def mismatch_dtype():
    """One rank reduces another dtype."""

    def sync(rank):
        value = torch.ones(4, dtype=torch.float64 if rank == 0 else torch.float32)
        dist.all_reduce(value)  # FAULT

    def main():
        for step in range(40):
            dist.all_reduce(torch.ones(16))
            if step == 20:
                sync(dist.get_rank())

    run(main)


def mismatch_shifted():
    """One rank reduces once more, a tensor of the usual shape: nothing shows before the end."""

    def log(loss):
        dist.all_reduce(loss)  # FAULT
        return loss.item()

    def main():
        loss = torch.ones(1)
        for step in range(40):
            dist.all_reduce(loss)
            if step == 20 and dist.get_rank() == 0:
                log(loss)

    run(main)


def mismatch_uneven():
    """One rank has fewer batches, and is at the barrier behind its loop while the others reduce gradients."""
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(40 if dist.get_rank() == 2 else 48, 8)
    for batch in DataLoader(samples, batch_size=4):  # FAULT
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    dist.barrier()  # FAULT
    del model  # see training.leave
    dist.destroy_process_group()


def mismatch_lone():
    """A callback gathers a metric on the first rank alone, when training is over: the others have left."""

    class Metrics:
        def on_train_end(self, trainer):
            if trainer.is_global_zero:
                gathered = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, {"loss": 1.0})  # FAULT

    class Trainer:
        def __init__(self, callbacks):
            self.callbacks = callbacks
            self.is_global_zero = dist.get_rank() == 0

        def fit(self, model, steps):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).mean().backward()
                optimizer.step()
            for callback in self.callbacks:
                callback.on_train_end(self)

    dist.init_process_group("gloo")
    Trainer([Metrics()]).fit(DDP(torch.nn.Linear(8, 2)), 20)
    dist.destroy_process_group()


def mismatch_skipped():
    """A rank skips the backward of one step, since its own loss is not finite: it shows when the others still train."""

    def main():
        model = DDP(torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            batch = torch.full((4, 8), float("inf") if dist.get_rank() == 1 and step == 9 else 1.0)
            optimizer.zero_grad()
            loss = model(batch).mean()
            if not torch.isfinite(loss):  # FAULT
                continue  # FAULT
            loss.backward()  # SKIPPED
            optimizer.step()

    run(main)


def mismatch_helper():
    """A rank reduces one value fewer in a helper than the others: it shows when the helper has returned there."""

    def reduce_all(values):
        for value in values:  # FAULT
            dist.all_reduce(value)

    def main():
        model = DDP(torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).mean().backward()  # FAULT
            optimizer.step()
            reduce_all([torch.ones(1)] * (1 if dist.get_rank() == 1 and step == 9 else 2))

    run(main)


def mismatch_autograd():
    """A function of the script's own reduces in backward, on one rank not always."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, empty):
            ctx.empty = empty
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            if ctx.empty:  # FAULT
                return gradient, None  # FAULT
            gradient = gradient.clone()
            dist.all_reduce(gradient)  # SKIPPED
            return gradient, None

    def main():
        model = torch.nn.Linear(8, 2)
        for step in range(20):
            empty = dist.get_rank() == 1 and step == 9
            Summed.apply(model(torch.randn(4, 8)), empty).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

    run(main)


def model_frozen():
    """One rank freezes a layer; DDP's constructor does not notice, and the first backward does not end."""

    def main():
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        if dist.get_rank() == 1:
            net[0].weight.requires_grad = False
        model = DDP(net)  # FAULT
        for _ in range(10):
            model(torch.randn(4, 8)).mean().backward()

    run(main)


def deadlock_groups():
    """Two ranks use the group of all and one of their own in opposite order; a third only waits with one of them."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    ones = torch.ones(4)
    for _ in range(10):
        dist.all_reduce(ones)
    if rank == 1:
        dist.all_reduce(ones, group=pair)  # FAULT
    dist.barrier()  # FAULT
    if rank == 0:
        dist.all_reduce(ones, group=pair)
    dist.destroy_process_group()


def deadlock_message():
    """One rank waits for a message that the other sends only after the barrier at which it waits for that rank."""
    dist.init_process_group("gloo")
    ones = torch.ones(4)
    for _ in range(5):
        dist.all_reduce(ones)
    if dist.get_rank() == 0:
        dist.barrier()  # FAULT
        dist.send(ones, dst=1)
    else:
        dist.recv(ones, src=0)  # FAULT
        dist.barrier()
    dist.destroy_process_group()


def deadlock_receive():
    """Three of four ranks receive in a ring before they send; the fourth waits at a barrier."""

    def main():
        rank = dist.get_rank()
        ones = torch.ones(4)
        dist.all_reduce(ones)
        if rank < 3:
            dist.recv(ones, src=(rank - 1) % 3)  # FAULT
            dist.send(ones, dst=(rank + 1) % 3)

    run(main)


def nonfinite_backward():
    """An operation whose slope is infinite at a value that one rank meets: loss and input are finite."""
    BAD_STEP = 6

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = (torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x, bad):
            hidden = self.second(torch.relu(self.first(x)))
            if bad:
                hidden = torch.where(hidden == hidden, hidden, (hidden - hidden.detach()).sqrt())
            return self.head(hidden)

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 10):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8), step == BAD_STEP and dist.get_rank() == 2).square().mean()
        loss.backward()  # FAULT
        optimizer.step()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def nonfinite_input(slow_steps=0):
    """One sample of one rank holds NaN; a step is made of two batches, of which the first is the bad one."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    for step in range(1, 7 + int(slow_steps)):
        if step >= 7:
            time.sleep(0.1)
        batches = [torch.randn(4, 8) for _ in range(2)]
        if step == 4 and dist.get_rank() == 0:
            batches[0][3, 5] = float("nan")
        with model.no_sync():
            model(batches[0].clone()).square().mean().backward()  # FAULT
        model(batches[1].clone()).square().mean().backward()
        for parameter in model.parameters():
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def unused(how):
    """A backward leaves out a part of the model on one rank; DDP knows of it (find_unused_parameters), or does not."""
    STEPS = 6

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(8, 8)
            self.head = torch.nn.Linear(8, 4)
            self.extra = torch.nn.Linear(8, 4)

        def forward(self, x, with_extra):
            hidden = self.body(x)
            return self.head(hidden) + (self.extra(hidden) if with_extra else 0)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Model(), find_unused_parameters=how == "set")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8), not (dist.get_rank() == 1 and step == 3)).sum()
        loss.backward()
        optimizer.step()
        if how == "logged":
            dist.all_reduce(loss.detach())
    del model  # see training.leave
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
