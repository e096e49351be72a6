"""Trains a little, again and again, each time with another function of the recorder broken; says what was harmed.

python trains.py EVERY, which is 1 for all functions, 2 for every other one.
"""

import contextlib
import io
import os
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

import torch
import torch.distributed as dist
from _ddpdoctor_recorder import sampler, step_clock
from _ddpdoctor_recorder.state import here
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

torch.set_num_threads(1)
WALLS = {"failed", "guarded", "wraps", "apply", "begin_wait", "end_wait", "_forward_ended"}
WALLS |= {"enter_phase", "leave_phase", "_write_wait", "_clear", "pass_on", "came_from_outside"}
"""What stands between a failure and the script, or is one try statement itself."""
CALLERS = {"run", "wake_up", "rests", "_forget"}
"""What makes the script's own call, or is called by nobody that the script could notice."""
READERS = {"is_own_file", "_is_ours"}
"""Without these an error shows frames of the recorder, and nothing else is amiss."""
ERRORS = (OSError, ValueError, MemoryError, RuntimeError)


def train(store):
    """Return what a training run computes, prints and raises."""
    said = []
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(torch.arange(8.0).reshape(4, 2), batch_size=2):
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        said.append(loss.item())
    group = dist.new_group([0])
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    said.append(work.wait())
    said.append(dist.all_gather_object([None], "x"))
    dist.barrier()
    said.extend(fail())
    del model  # freed after its group, it can deadlock with a thread of Gloo
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    said.append(fork())
    return said


def fail():
    """Return how errors of a call, of the script, of a thread and at an exit read."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        try:
            dist.all_reduce("no tensor")
        except TypeError:
            traceback.print_exc()
        try:
            dist.send(torch.ones(1), dst=0)
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        thread = threading.Thread(target=int, args=("no number",), name="t")
        thread.start()
        thread.join()
    yield text.getvalue()
    try:
        sys.exit("leaves")
    except SystemExit as error:
        yield error.code


def fork():
    child = os.fork()
    if child == 0:
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if sampler._current is not None:
        sampler._current.answered = -1
        sampler._current.wake_up()
    return status


def places():
    """Yield where each function of the recorder can be found: owner, name, function."""
    parts = [module for name, module in sorted(sys.modules.items()) if name.startswith("_ddpdoctor_recorder.")]
    for part in parts:
        for name, value in sorted(vars(part).items()):
            if isinstance(value, types.FunctionType) and value.__module__ == part.__name__ and is_own(value):
                yield part, name, value
            if isinstance(value, type) and value.__module__ == part.__name__:
                for member, function in sorted(vars(value).items()):
                    if isinstance(function, types.FunctionType) and is_own(function):
                        yield value, member, function


def is_own(function):
    return function.__name__ not in WALLS | CALLERS | READERS and "<locals>" not in function.__qualname__


@contextlib.contextmanager
def broken(owner, name, function, error):
    """Have a function raise, under every name that it has; yield how often it was called."""
    called = []

    def raises(*_args, **_kwargs):
        called.append(1)
        raise error("broken on purpose: " + name)

    # The error is one of the recorder.
    raises.__code__ = raises.__code__.replace(co_filename=function.__code__.co_filename)
    where = [(owner, name)]
    for module in [module for key, module in sys.modules.items() if key.startswith("_ddpdoctor_recorder.")]:
        where += [(module, key) for key, value in vars(module).items() if value is function and module is not owner]
    for place, key in where:
        setattr(place, key, raises)
    try:
        yield called
    finally:
        for place, key in where:
            setattr(place, key, function)


def main():
    sampler.LOOKS_APART_S = 0.0
    folder, hook = Path(tempfile.mkdtemp()), sys.excepthook
    expected = train(folder / "first")
    for number, (owner, name, function) in list(enumerate(places()))[:: int(sys.argv[1])]:
        here.failures = 0
        full_name = f"{owner.__name__.rpartition('.')[2]}.{name}"
        sys.excepthook = hook  # torch puts another one in front of it each time
        with broken(owner, name, function, ERRORS[number % 4]) as called:
            try:
                got = train(folder / str(number))
            except BaseException:  # noqa: BLE001 - whatever it is, it is reported below
                got = traceback.format_exc()
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
        step_clock.clock.phases, step_clock.clock.waiting = 0, False
        if got != expected:
            print(
                "HARMED by",
                full_name,
                got if isinstance(got, str) else [g for g, e in zip(got, expected, strict=False) if g != e],
            )
        print("called" if called else "not called", full_name, here.failures, flush=True)
    print("done")


main()
