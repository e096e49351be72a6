"""Rank 1 sleeps; rank 0 has begun a reduction on the device and stands in item(). With WATCHED=1 the job watches itself."""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from place import DEVICE, SEEDED, join, leave

import ddpdoctor

WATCHED = os.environ.get("WATCHED") == "1"


def main():
    rank = join()
    value = torch.ones(4, device=DEVICE)
    folder = os.path.join(os.path.dirname(sys.argv[1]), "run")
    with ddpdoctor.watch(hang_timeout=8, on_hang="kill", report_dir=folder) if WATCHED else contextlib.nullcontext():
        for step in range(20):
            while rank == 1 and step == 10 and SEEDED:
                time.sleep(1000)  # FAULT
            dist.all_reduce(value)
            value.sum().item()
    if rank == 0:
        leave({"level": dist.get_debug_level().name})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
