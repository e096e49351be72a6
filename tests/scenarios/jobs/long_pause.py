"""One rank pauses for longer than the hang timeout, and then goes on."""

import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    for step in range(20):
        if dist.get_rank() == 1 and step == 10:
            time.sleep(9)  # FAULT
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
