"""Rank 0 prepares data past torch's own time limit: it is still at it when rank 1 gives up, or comes just after."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
HOW, GAVE_UP, CAME = sys.argv[1], Path(sys.argv[2] + ".gave-up"), Path(sys.argv[2] + ".came")
HERE = [Path(f"{sys.argv[2]}.here-{rank}") for rank in range(2)]


def wait_for(path):
    while not path.exists():
        time.sleep(0.05)


def tokenize():
    while HOW == "still" or not GAVE_UP.exists():  # FAULT
        sum(n * n for n in range(20_000))  # FAULT


def main():
    # On a busy machine torch may be imported in one rank much sooner than in the other.
    HERE[int(os.environ["RANK"])].touch()
    for path in HERE:
        wait_for(path)
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    if dist.get_rank() == 0:
        tokenize()
        CAME.touch()
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        GAVE_UP.touch()
        if HOW == "late":
            wait_for(CAME)
        raise


if __name__ == "__main__":
    main()
