"""A rank waits for a result of a process of its own that has died."""

import multiprocessing
import os
import signal

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def work(results):
    os.kill(os.getpid(), signal.SIGKILL)
    results.put(1)


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        worker = context.Process(target=work, args=(results,))
        worker.start()
        results.get()  # FAULT
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
