"""Signal handlers and another thread raise exceptions in a training loop, again and again, and it handles all of them.

No exception is sent before the last one was handled or is known to be lost, so a slow machine changes no result.
"""

import ctypes
import gc
import os
import random
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

EACH = int(os.environ.get("EACH", "20"))
torch.set_num_threads(1)


class LeaveError(Exception):
    """What a script raises to leave its loop."""


class Counts:
    sent = handled = lost = half = 0
    is_due = True


def handler(_number, _frame):
    Counts.sent += 1
    Counts.is_due = True
    raise made()


class Handler:
    def __call__(self, *args):
        return handler(*args)


def wait():
    return delays.uniform(0.0001, 0.002)


def by_timer():
    signal.setitimer(signal.ITIMER_REAL, wait())


def by_thread():
    def send():
        Counts.sent += 1
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(made))
        Counts.is_due = True

    threading.Timer(wait(), send).start()


def calls():
    while True:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        tensor.fill_(1.0)
        yield


def garbage():
    while True:
        kept = [[number] for number in range(2000)]
        kept.append(kept)
        gc.collect()
        yield


class Training:
    """Takes one stage of a step after the other, and begins an interrupted one anew."""

    def __init__(self):
        layers = (torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers), **model_options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 4)), batch_size=8)
        self.batches = iter(self.loader)

    def __call__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        torch.set_grad_enabled(True)  # an optimizer of torch that is interrupted may leave it off
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            return
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        try:
            loss.backward()
        finally:
            # Without the recorder no Python runs inside of a backward on a CPU, so it is done or it was not begun.
            Counts.half += len({parameter.grad is None for parameter in self.model.parameters()}) - 1
        self.optimizer.step()


def interrupt(work, send):
    Counts.sent = Counts.handled = Counts.lost = Counts.half = 0
    Counts.is_due = True
    while Counts.handled + Counts.lost < EACH:
        try:
            for _ in work():
                if Counts.is_due:
                    Counts.lost += Counts.sent - Counts.handled - Counts.lost
                    if Counts.handled + Counts.lost >= EACH:
                        break
                    Counts.is_due = False
                    send()
        except made:
            Counts.handled += 1
    return f"{Counts.lost} lost, {Counts.half} backwards half done, gradients {torch.is_grad_enabled()}"


main = threading.get_ident()
gc.freeze()  # torch's own objects need not be collected again and again
delays = random.Random(29)
dist.init_process_group("gloo")
tensor = torch.ones(4)
for model_options, made, handle in (
    ({}, LeaveError, handler),
    ({"gradient_as_bucket_view": True}, TimeoutError, Handler()),
):
    training = Training()
    for _ in range(12):
        next(training)
    signal.signal(signal.SIGALRM, handle)
    print("DDP", model_options, made.__name__, interrupt(training, by_timer))
for made, work, send in (
    (LeaveError, calls, by_timer),
    (TimeoutError, calls, by_timer),
    (KeyboardInterrupt, calls, by_timer),
    (LeaveError, calls, by_thread),
    (TimeoutError, calls, by_thread),
    (LeaveError, garbage, by_timer),
):
    print(work.__name__, made.__name__, send.__name__, interrupt(work, send))
for _ in range(3):  # what an interruption has cut off is put right in a whole step
    next(training)
recorder = getattr(sys, "_ddpdoctor_recorder", None)
if recorder is not None:
    left = (recorder.clock.waiting, recorder.clock.phases, recorder.clock.loading, recorder.ring.get("wait_since_ns"))
    assert left == (False, 0, False, 0), left
