"""Slow ranks, and ranks that only look slow: each function is a job, and its name is the argument."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from training import run


def straggler_before():
    """Rank 1 prepares its batches ten times as long as the others."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def prepare(step):
        batch = torch.full((4, 8), float(step))
        if rank == 1:
            time.sleep(0.1)  # FAULT
        return batch

    for step in range(25):
        batch = prepare(step)
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def straggler_forward():
    """Rank 0 of two is slow in a layer of its model; buffers of batch norm go out from it."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 4)
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x):
            if rank == 0:
                time.sleep(0.1)  # FAULT
            return self.norm(self.linear(x))

    model = DDP(torch.nn.Sequential(Layer(), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(25):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def straggler_backward():
    """Ranks 1 and 3 of four are slow in the backward of a function of the script's own."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            if rank in (1, 3):
                time.sleep(0.15)  # FAULT
            return gradient * 2

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 1)

        def forward(self, x):
            return Scale.apply(self.linear(x))

    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(25):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def straggler_plain():
    """Without DDP: gradients are averaged by hand, and rank 2 loses time each step."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    def measure(step):
        if rank == 2:
            time.sleep(0.1)  # FAULT
        return torch.full((16,), float(step))

    for step in range(25):
        value = measure(step)
        dist.all_reduce(value)
        dist.all_reduce(value)
    dist.destroy_process_group()


class Images(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 240

    def __getitem__(self, index):
        time.sleep(self.seconds)  # FAULT straggler_input
        return torch.full((8,), float(index))


def straggler_input(how, method):
    """Loader workers take long for each batch: on rank 1 alone, or on all ranks, of which rank 0 is a little behind."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Images(0.02 if how == "all" or rank == 1 else 0.002)
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, multiprocessing_context=method,
        sampler=torch.utils.data.DistributedSampler(data, shuffle=False),
    )  # fmt: skip
    model = DDP(torch.nn.Linear(8, 1))
    dist.barrier()
    if how == "all" and rank == 0:
        time.sleep(0.04)
    for batch in loader:
        model(batch).mean().backward()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def clean_checkpoints():
    """Rank 0 saves a checkpoint every tenth step, which takes a second; nobody is slow."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(30):
        time.sleep(0.02)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            time.sleep(1.0)
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def clean_turns():
    """Each rank in turn is the slow one of a step, as with inputs of random lengths."""
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(30):
        time.sleep(0.1 if step % world == rank else 0.01)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


def starved():
    """Healthy ranks whose children and loader workers compute; beside many busy programs they get little of a core."""
    PREPARE = "total = 0\nfor number in range(6_000_000): total += number"

    class Samples(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.full((32,), float(sum(range(300_000)) % 7))

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if dist.get_rank() == 1:
        subprocess.run([sys.executable, "-S", "-c", PREPARE], check=True)
    for batch in DataLoader(Samples(), batch_size=4, num_workers=1):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    del model
    dist.destroy_process_group()


def gradient_times(unused):
    """Layers whose backward sleeps, so that it is known when each gradient is ready; `unused` says what is."""
    SLEEP_S = 0.01
    BRANCH_STEP = 25

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(SLEEP_S)
            return gradient

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
            self.extra = torch.nn.Linear(16, 16)

        def forward(self, x, uses_extra):
            for layer in self.layers:
                x = Slow.apply(layer(x))
            return self.extra(x) if uses_extra else x

    def main():
        model = DDP(Model(), bucket_cap_mb=0.002, find_unused_parameters=unused != "fixed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(50):
            loss = model(torch.randn(4, 16), unused != "changing" or step != BRANCH_STEP).mean()
            time.sleep(3 * SLEEP_S)  # it belongs to the loss, and not to backward
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run(main)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
