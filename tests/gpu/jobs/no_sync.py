"""Trains behind a long kernel, and sees whether the host got through each step while the device was still in it.

Steps 12 to 15 are not looked at (replicas are compared at 8 and 16), and DDP's own timers rest after the tenth. In them
torch raises at each operation that waits for the device, which the recorder notes as a failure of its own.
"""

import time

import torch
import torch.distributed as dist
from place import DEVICE, DRY, join, leave, settle
from torch.nn.parallel import DistributedDataParallel as DDP

QUIET = range(12, 16)
CYCLES = 1_000_000_000
"""About half a second of an H200."""


def main():
    rank = join()
    torch.manual_seed(0)
    steps = {}
    for views in (False, True):
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]
        model = DDP(torch.nn.Sequential(*layers).to(DEVICE), gradient_as_bucket_view=views)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        given = torch.randn(32, 256, device=DEVICE)
        steps["views" if views else "plain"] = [train(model, optimizer, given, step) for step in range(1, 17)]
    if rank == 0:
        leave(steps)
    dist.barrier()
    dist.destroy_process_group()


def train(model, optimizer, given, step):
    """Return how long the host took for a step, and whether the device was still in its kernel then."""
    settle()
    quiet = step in QUIET and not DRY
    if quiet:
        torch.cuda._sleep(CYCLES)
        behind = torch.cuda.Event()
        behind.record()
        torch.cuda.set_sync_debug_mode("error")
    began = time.monotonic()
    optimizer.zero_grad()
    model(given).square().mean().backward()
    optimizer.step()
    took = time.monotonic() - began
    if quiet:
        torch.cuda.set_sync_debug_mode("default")
    return {"step": step, "host_ms": round(took * 1e3, 2), "ran_ahead": not behind.query() if quiet else None}


if __name__ == "__main__":
    main()
