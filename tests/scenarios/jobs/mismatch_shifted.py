"""One rank reduces once more, a tensor of the usual shape: nothing shows before the end."""

import torch
import torch.distributed as dist
from training import run


def log(loss):
    dist.all_reduce(loss)  # FAULT
    return loss.item()


def main():
    loss = torch.ones(1)
    for step in range(40):
        dist.all_reduce(loss)
        if step == 20 and dist.get_rank() == 0:
            log(loss)


run(main)
