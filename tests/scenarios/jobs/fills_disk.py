"""Fills the disk that its run folder is on, once or again and again, and then hangs."""

import os
import threading
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def fill(path):
    try:
        with open(path, "ab") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()
    except OSError:
        pass


def fill_again(path):
    while True:
        fill(path)
        time.sleep(0.01)


def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        fill(os.environ["FILL"])
    if dist.get_rank() == 0 and "AGAIN" in os.environ:
        threading.Thread(target=fill_again, args=(os.environ["FILL"],), daemon=True).start()
    dist.barrier()
    while dist.get_rank() == 1:
        time.sleep(1000)  # FAULT
    dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main()
