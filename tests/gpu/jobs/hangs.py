"""Ranks over NCCL that wait, or seem to: each function is a job, and its name follows the file of its result."""

import contextlib
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from place import BACKEND, DEVICE, DRY, NUMBER, SEEDED, join, leave


def sleeper():
    """Rank 1 sleeps; rank 0 has begun a reduction on the device and stands in item(). With WATCHED=1 it watches itself."""
    import ddpdoctor

    watched = os.environ.get("WATCHED") == "1"
    rank = join()
    value = torch.ones(4, device=DEVICE)
    folder = os.path.join(os.path.dirname(sys.argv[1]), "run")
    with ddpdoctor.watch(hang_timeout=8, on_hang="kill", report_dir=folder) if watched else contextlib.nullcontext():
        for step in range(20):
            while rank == 1 and step == 10 and SEEDED:
                time.sleep(1000)  # FAULT
            dist.all_reduce(value)
            value.sum().item()
    if rank == 0:
        leave({"level": dist.get_debug_level().name})
    dist.barrier()
    dist.destroy_process_group()


def ddp_sleeper():
    """Rank 1 sleeps before its forward. Rank 0's reduction was begun by DDP's C++, and it stands in item()."""
    rank = join()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 4).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20):
        while rank == 1 and step == 10:
            time.sleep(1000)  # FAULT
        optimizer.zero_grad()
        model(torch.randn(8, 16, device=DEVICE)).square().mean().backward()
        optimizer.step()
        model.module.weight.sum().item()


def pending_oldest():
    """Rank 0 runs 150 reductions ahead of rank 1, which sleeps before the first: that of one element is waited for."""
    rank = join(at_once=True)
    values = [torch.ones(number, device=DEVICE) for number in range(1, 151)]
    while rank == 1:
        time.sleep(1000)  # FAULT
    works = [dist.all_reduce(value, async_op=True) for value in values]
    for work in works:
        work.wait()
    values[-1].sum().item()


def subgroup():
    """Rank 1 sleeps before a reduction of a second group, which NCCL splits off the first one, made at once."""
    rank = join(at_once=True)
    group = dist.new_group([0, 1], group_desc="pair")
    alone = [dist.new_group([number]) for number in range(2)][rank]
    value = torch.ones(4, device=DEVICE)
    for step in range(20):
        dist.all_reduce(value)
        dist.all_reduce(value, group=alone)
        while rank == 1 and step == 10 and SEEDED:
            time.sleep(1000)  # FAULT
        dist.all_reduce(value, group=group)
        value.sum().item()
    dist.barrier()
    dist.destroy_process_group()


def mixed_backend_objects():
    """A group over Gloo and NCCL: rank 1 sleeps between two collectives of objects, which go over Gloo."""
    rank = join("gloo" if DRY else "cpu:gloo,cuda:nccl")
    value = torch.ones(4, device=DEVICE)
    found = [None, None]
    for step in range(20):
        dist.all_reduce(value)
        value.sum().item()
        dist.all_gather_object(found, {"step": step})
        while rank == 1 and step == 10 and SEEDED:
            time.sleep(1000)  # FAULT
        dist.all_gather_object(found, {"step": step})
    dist.barrier()
    dist.destroy_process_group()


def compiled_allreduce():
    """A compiled function reduces, which no hook of ours sees; rank 1 sleeps before its call."""
    import torch.distributed._functional_collectives as functional

    @torch.compile(backend="aot_eager" if DRY else "inductor", fullgraph=True)
    def reduced(value, ranks):
        return functional.all_reduce(value * 2, "sum", ranks) / 4

    rank = join()
    value = torch.ones(1024, device=DEVICE)
    ranks = [0, 1]
    for step in range(20):
        while rank == 1 and step == 10:
            time.sleep(1000)  # FAULT
        value = reduced(value, ranks)
        value.sum().item()


def watchdog():
    """Rank 1 sleeps past the group's limit of 15 s, so that torch itself ends rank 0, the innocent one."""
    rank = join(timeout=datetime.timedelta(seconds=15))
    value = torch.ones(4, device=DEVICE)
    for step in range(20):
        while rank == 1 and step == 10:
            time.sleep(1000)  # FAULT
        dist.all_reduce(value)
        value.sum().item()


def late():
    """Jobs that torch itself ends at the group's limit, with a network of DDP. WHAT names what rank 1 does.

    "late": it comes to a call after the limit, and goes on. "late_soon": it comes before torch has dumped what was
    pending at the limit. "leaves": it takes fewer steps, and goes to a barrier.
    """
    what = os.environ["WHAT"]
    limit_s = 8
    rank = join(timeout=datetime.timedelta(seconds=limit_s))
    value = torch.ones(4, device=DEVICE)
    if what != "leaves":
        for step in range(10):
            if rank == 1 and step == 5:
                time.sleep(limit_s + 2 if what == "late_soon" else 3 * limit_s)
            dist.all_reduce(value)
            value.sum().item()
    else:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        options = {"device_ids": [NUMBER]} if BACKEND == "nccl" else {}
        model = DDP(torch.nn.Sequential(*layers).to(DEVICE), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _step in range(15 if rank == 1 else 20):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16).to(DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()
        dist.barrier()  # FAULT leaves
    dist.destroy_process_group()


def recv_without_send():
    """Rank 1 waits for a message that rank 0 sends only after a reduction for which it waits for rank 1."""
    rank = join()
    ones = torch.ones(4, device=DEVICE)
    dist.all_reduce(ones)
    if rank == 0:
        dist.send(ones, dst=1)
        ones.sum().item()
        dist.all_reduce(ones)  # FAULT
        ones.sum().item()
        dist.send(ones, dst=1)
    else:
        dist.recv(ones, src=0)
        ones.sum().item()
        dist.recv(ones, src=0)  # FAULT
        ones.sum().item()
        dist.all_reduce(ones)
    dist.destroy_process_group()


def early_exit():
    """Rank 1 leaves in the middle of training with status 0; rank 0 stands in item()."""
    rank = join()
    value = torch.ones(4, device=DEVICE)
    for step in range(20):
        if rank == 1 and step == 10:
            sys.exit(0)  # FAULT
        dist.all_reduce(value)
        value.sum().item()
    dist.destroy_process_group()


def slow_kernel():
    """Both ranks wait for one reduction, behind kernels of rank 1 that take 24 s. Nothing is wrong."""
    rank = join()
    value = torch.ones(4, device=DEVICE)
    for step in range(20):
        if rank == 1 and step == 10 and not DRY:
            for _ in range(24):
                torch.cuda._sleep(2_000_000_000)  # about a second of an H200
        dist.all_reduce(value)
        value.sum().item()
    dist.barrier()
    dist.destroy_process_group()


def straggler():
    """Rank 1 is 0.1 s late to each step, on the host or on its device. Over NCCL its kernels are the shortest."""
    rank = join()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 4).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        if rank == 1 and SEEDED and not DRY:
            torch.cuda._sleep(200_000_000)  # about 0.1 s of an H200
        elif rank == 1:
            time.sleep(0.1)
        optimizer.zero_grad()
        model(torch.randn(8, 16, device=DEVICE)).square().mean().backward()
        optimizer.step()
        model.module.weight.sum().item()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[2]]()
