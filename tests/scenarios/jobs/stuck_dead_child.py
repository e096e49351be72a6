"""A rank waits for a result of a process of its own that has died."""

import multiprocessing
import os
import signal

import torch.distributed as dist
from training import run


def work(results):
    os.kill(os.getpid(), signal.SIGKILL)
    results.put(1)


def main():
    if dist.get_rank() == 1:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        worker = context.Process(target=work, args=(results,))
        worker.start()
        results.get()  # FAULT


if __name__ == "__main__":
    run(main)
