"""Hangs, and has a SIGTERM handler of its own that ends nothing."""

import signal
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, lambda *unused: print("not now", flush=True))
    dist.all_reduce(torch.ones(4))
    while dist.get_rank() == 1:
        time.sleep(1000)  # FAULT
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
