"""A compiled function reduces, which no hook of ours sees; rank 1 sleeps before its call."""

import time

import torch
import torch.distributed._functional_collectives as functional
from place import DEVICE, DRY, join


@torch.compile(backend="aot_eager" if DRY else "inductor", fullgraph=True)
def reduced(value, ranks):
    return functional.all_reduce(value * 2, "sum", ranks) / 4


def main():
    rank = join()
    value = torch.ones(1024, device=DEVICE)
    ranks = [0, 1]
    for step in range(20):
        while rank == 1 and step == 10:
            time.sleep(1000)  # FAULT
        value = reduced(value, ranks)
        value.sum().item()


if __name__ == "__main__":
    main()
