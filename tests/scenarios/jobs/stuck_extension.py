"""A rank builds an extension, and the builder never ends."""

import torch.distributed as dist
from torch.utils.cpp_extension import load_inline
from training import run


def main():
    if dist.get_rank() == 1:
        load_inline("answer", "int answer() { return 42; }", functions=["answer"])  # FAULT


run(main)
