"""Fails at its first attempt and ends well at the second."""

import os

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        raise OSError("the first attempt")  # FAULT
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
