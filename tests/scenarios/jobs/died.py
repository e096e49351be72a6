"""Ranks that die, or end too early: each function is a job, and its name is the argument."""

import atexit
import ctypes
import logging
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from training import batches, loop, random_batch, run, spawn, train


def early_exit_return():
    """A rank thinks that it is done, and ends well."""

    def load(step):
        if dist.get_rank() == 2 and step == 30:
            sys.exit(0)  # FAULT
        return torch.randn(4, 8)

    train(load)


def early_exit_hard():
    """A rank leaves at once, with status 0, while others wait on a group made of all."""

    def load(step):
        if dist.get_rank() == 0 and step == 30:
            os._exit(0)  # FAULT
        return torch.randn(4, 8)

    train(load)


def early_exit_before_init():
    """A rank finds nothing to do, and leaves before it joins the group."""
    if os.environ["RANK"] == "1":
        sys.exit()  # FAULT
    train()


def early_exit_stopping():
    """A rank stops early by its own loss, leaves the loop and ends well."""

    def train(model, steps):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            opt.zero_grad()
            model(torch.randn(4, 8)).mean().backward()
            opt.step()
            if dist.get_rank() == 1 and step == 30:
                break

    dist.init_process_group("gloo")
    train(DDP(torch.nn.Linear(8, 2)), 60)
    print("done")


def crash_loader_worker():
    """A DataLoader worker of one rank raises."""

    def read(i):
        if i == 45:
            raise KeyError(f"sample {i}")  # FAULT
        return torch.randn(8)

    def main():
        model = DDP(torch.nn.Linear(8, 2))
        for batch in batches(read):
            model(batch).mean().backward()

    run(main)


def crash_exit_status():
    """A rank leaves with a status and no exception."""

    def load(step):
        if dist.get_rank() == 1 and step == 15:
            sys.exit(3)  # FAULT
        return torch.randn(4, 8)

    train(load)


def crash_everywhere():
    """All ranks run into the same bug."""

    def load(step):
        return torch.randn(4, 8 if step < 10 else 9) @ torch.eye(8)  # FAULT

    train(load)


def crash_before_init():
    """A rank raises before it joins the group."""
    if os.environ["RANK"] == "2":
        raise FileNotFoundError("/data/shard-2")  # FAULT
    train()


def crash_victims_text():
    """A rank's own error has the text that the victims of a failure have."""

    def load(step):
        if dist.get_rank() == 1 and step == 20:
            raise RuntimeError("Connection closed by peer [10.0.0.7]:2049")  # FAULT
        return torch.randn(4, 8)

    train(load)


def crash_backward():
    """An autograd function of the user's raises on one rank, in the middle of a backward."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, step):
            ctx.step = step
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if dist.get_rank() == 3 and ctx.step == 20:
                raise ArithmeticError("the loss is not finite")  # FAULT
            return grad * 2, None

    def load(step):
        return Scale.apply(torch.randn(4, 8, requires_grad=True), step)

    train(load)


def crash_logged():
    """The script logs any error and leaves with status 1, on the victims' ranks too."""

    def load(step):
        if dist.get_rank() == 1 and step == 20:
            raise KeyError("label")  # FAULT
        return torch.randn(4, 8)

    try:
        train(load)
    except Exception:
        logging.exception("training failed")
        sys.exit(1)


def crash_evaluation():
    """Rank 0 evaluates alone and fails, while the others wait at the barrier after it."""

    def evaluate(model):
        with torch.no_grad():
            guess = model(torch.randn(4, 8))
        assert guess.shape == (4, 3), "wrong head"  # FAULT

    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 2))
    loop(model, steps=20)
    if dist.get_rank() == 0:
        evaluate(model.module)
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def crash_clean_up():
    """Rank 1 raises an error, and gathers its timings at the end of its with block before the error is printed."""

    class Timings:
        def __enter__(self):
            return self

        def __exit__(self, *unused):
            dist.all_gather_object([None] * dist.get_world_size(), 0.5)

    def load(step):
        if dist.get_rank() == 1 and step == 20:
            raise OSError("stale file handle")  # FAULT
        return torch.randn(4, 8)

    def work():
        with Timings():
            loop(DDP(torch.nn.Linear(8, 2)), load)

    run(work)


def crash_at_with():
    """Rank 1 raises an error, and its with block ends in a reduction that kills it before the error is printed."""
    NAMES = dict.fromkeys(range(70))

    class Counted:
        def __enter__(self):
            dist.barrier()

        def __exit__(self, *unused):
            dist.all_reduce(torch.ones(1))  # no other rank is here, and Gloo aborts for the size

    def load(step):
        NAMES[step + 20 * dist.get_rank()]  # FAULT
        return torch.randn(4, 8)

    def work():
        with Counted():
            loop(DDP(torch.nn.Linear(8, 2)), load)

    run(work)


def crash_child_script(role=""):
    """Rank 0 converts its checkpoint by a script, which fails; the ranks are the children of a wrapper."""

    def convert():
        names = {"weight": 1}
        return names["encoder.weight"]  # FAULT

    def load(step):
        if dist.get_rank() == 0 and step == 20:
            subprocess.run([sys.executable, __file__, "crash_child_script", "convert"], check=True)
        return torch.randn(4, 8)

    if role == "convert":
        convert()
    elif role == "train":
        train(load)
    else:
        sys.exit(subprocess.run([sys.executable, __file__, "crash_child_script", "train"], check=False).returncode)


def crash_hardware():
    """Rank 1 raises what torch raises when the memory of its GPU fails."""
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if dist.get_rank() == 1:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered, password=hunter2hunter2")  # FAULT
    dist.all_reduce(ones)


def crash_memory_limit():
    """A rank asks for more memory than its limit of addresses lets it have."""
    GIB = 2**30

    def main():
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))
            torch.empty(16 * GIB, dtype=torch.uint8)  # FAULT

    run(main)


def crash_shared_memory():
    """The batches of a rank's loader worker do not fit into /dev/shm."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return torch.ones(2**22)

    def main():
        if dist.get_rank() == 1:
            for _ in torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1):  # FAULT
                pass

    run(main)


def raise_at_step_10(step):
    if dist.get_rank() == 1 and step == 10:
        raise RuntimeError("no such shard")  # FAULT crash_spawn
    return random_batch(step)


def crash_spawn():
    """A rank that the script started itself raises."""

    spawn(raise_at_step_10)


def early_step():
    """The optimizer changes the parameters between a forward and its backward, as in many a GAN."""
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).mean().backward()
    loss = model(torch.randn(2, 4)).mean()
    optimizer.step()
    loss.backward()  # FAULT
    del model  # see training.leave
    dist.destroy_process_group()


def killed_segv():
    """A rank reads memory that is not its own."""

    def load(step):
        if dist.get_rank() == 1 and step == 15:
            ctypes.string_at(8)  # FAULT
        return torch.randn(4, 8)

    train(load)


def killed_sigkill():
    """Something outside kills a rank between two collectives."""

    def load(step):
        if dist.get_rank() == 0 and step == 25:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(4, 8)

    train(load)


def killed_sigbus():
    """A rank reads a mapped file that somebody has cut short."""

    def read_mapped():
        with tempfile.TemporaryFile() as file:
            file.truncate(8192)
            view = mmap.mmap(file.fileno(), 8192)
            file.truncate(0)
            return view[4096]  # FAULT

    def load(step):
        if dist.get_rank() == 0 and step == 20:
            read_mapped()
        return torch.randn(4, 8)

    train(load)


def killed_sigterm():
    """Somebody ends one rank by kill."""

    def load(step):
        if dist.get_rank() == 2 and step == 20:
            subprocess.run(["kill", str(os.getpid())])
            time.sleep(1000)
        return torch.randn(4, 8)

    train(load)


def killed_abort():
    """Native code of a rank aborts in the middle of training."""

    def load(step):
        if dist.get_rank() == 1 and step == 20:
            os.abort()  # FAULT
        return torch.randn(4, 8)

    train(load)


def killed_oom():
    """A rank keeps every batch, until its cgroup has no memory left."""
    dist.init_process_group("gloo")
    kept = []
    while True:
        if dist.get_rank() == 1:
            kept.append(torch.ones(2**23, dtype=torch.float32))  # FAULT
        dist.all_reduce(torch.ones(4))  # a line that may be the last one seen  # FAULT


def abort_at_exit():
    """Trains well, and is aborted while the interpreter shuts down."""

    def main():
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            atexit.register(os.abort)

    run(main)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
