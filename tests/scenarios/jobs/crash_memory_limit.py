"""A rank asks for more memory than its limit of addresses lets it have."""

import resource

import torch
import torch.distributed as dist
from training import run

GIB = 2**30


def main():
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))
        torch.empty(16 * GIB, dtype=torch.uint8)  # FAULT


run(main)
