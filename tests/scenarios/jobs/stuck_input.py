"""A rank asks a question that nobody will answer."""

import os

import torch.distributed as dist
from training import run


def main():
    if dist.get_rank() == 1:
        reader, _ = os.pipe()
        os.dup2(reader, 0)
        input("Continue? ")  # FAULT


run(main)
