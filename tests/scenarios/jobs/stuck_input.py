"""A rank asks a question that nobody will answer."""

import os

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        reader, _ = os.pipe()
        os.dup2(reader, 0)
        input("Continue? ")  # FAULT
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
