"""Fails at its first attempt and ends well at the second.

The second joins no group: Gloo's own connect fails in about half of all restarts on one host, under torchrun too.
"""

import os

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        return
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise OSError("the first attempt")  # FAULT
    dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main()
