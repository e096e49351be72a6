"""What a training step of a DDP model with 300 parameters takes: time, launches, waits for the device, memory.

Replicas are compared at steps 1, 2, 4, 8, 16, 32 of each model: steps that are timed compare none, and calls are counted
in a step of either kind.
"""

import collections
import math
import statistics
import time

import torch
import torch.distributed as dist
from place import DEVICE, DRY, STANDIN, join, leave, settle
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, WIDTH = 150, 8 if STANDIN else 128
STEPS = 40
TIMED = range(17, 30)
COUNTED = {30: "quiet", 32: "compared"}
RUNTIME = ("cuda", "cu", "hip")
CALLS = (
    "LaunchKernel",
    "MemcpyAsync",
    "MemsetAsync",
    "EventRecord",
    "EventQuery",
    "EventSynchronize",
    "StreamWaitEvent",
    "StreamQuery",
    "StreamSynchronize",
    "DeviceSynchronize",
    "EventCreate",
    "Malloc",
    "Free",
    "HostAlloc",
)


def main():
    rank = join()
    found = {("views" if views else "plain"): measure(views) for views in (False, True)}
    if rank == 0:
        leave({**found, "standin": bool(STANDIN)})
    dist.barrier()
    dist.destroy_process_group()


def measure(views):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)
    model = DDP(net, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    given = torch.randn(64, WIDTH, device=DEVICE)

    def step():
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()

    times, counts = [], {}
    if not DRY:
        torch.cuda.reset_peak_memory_stats()
    for number in range(1, STEPS + 1):
        settle()
        began = time.perf_counter()
        if number in COUNTED:
            counts[COUNTED[number]] = count(step)
        else:
            step()
        settle()
        if number in TIMED:
            times.append((time.perf_counter() - began) * 1e3)
    counts["norms"] = count(norms, [parameter.grad for parameter in net.parameters()])
    buckets = model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    return {
        "step_ms": round(statistics.median(times), 3),
        "fastest_ms": round(min(times), 3),
        "counts": counts,
        "buckets": len([size for size in buckets.split(",") if size.strip()]),
        "parameters": len(list(net.parameters())),
        "peak_mib": 0 if DRY else round(torch.cuda.max_memory_allocated() / 2**20, 2),
    }


def norms(gradients):
    return torch.stack(torch._foreach_norm(gradients, math.inf))


def count(step, *given):
    """Return how often a step calls each function of CUDA's; in a dry run how many operations it has."""
    step(*given) if given else None
    settle()
    if STANDIN:
        before = [STANDIN(b"cuda" + name.encode()) for name in CALLS]
        step(*given)
        found = {"cuda" + name: STANDIN(b"cuda" + name.encode()) - was for name, was in zip(CALLS, before)}
        settle()
        return found
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU] if DRY else [kinds.CPU, kinds.CUDA]) as profile:
        step(*given)
        settle()
    found = collections.Counter()
    for event in profile.key_averages():
        if event.key.startswith(RUNTIME):
            found[event.key] += event.count
        elif event.key.startswith("aten::"):
            found["operations"] += event.count
    return dict(found)


if __name__ == "__main__":
    main()
