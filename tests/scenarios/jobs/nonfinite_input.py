"""One sample of one rank holds NaN; a step is made of two batches, of which the first is the bad one."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    slow_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    for step in range(1, 7 + slow_steps):
        if step >= 7:
            time.sleep(0.1)
        batches = [torch.randn(4, 8) for _ in range(2)]
        if step == 4 and dist.get_rank() == 0:
            batches[0][3, 5] = float("nan")
        with model.no_sync():
            model(batches[0].clone()).square().mean().backward()  # FAULT
        model(batches[1].clone()).square().mean().backward()
        for parameter in model.parameters():
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
