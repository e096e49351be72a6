"""A rank builds an extension, and the builder never ends."""

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load_inline

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        load_inline("answer", "int answer() { return 42; }", functions=["answer"])  # FAULT
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
