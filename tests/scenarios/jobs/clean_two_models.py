"""Two models trained in turn, a communication hook, a sharded optimizer, a thread that logs, a rank that writes last."""

import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def log():
    while True:
        time.sleep(0.5)


def train(maker, judge, steps):
    opt_maker = ZeroRedundancyOptimizer(maker.parameters(), torch.optim.Adam, lr=0.01)
    opt_judge = torch.optim.Adam(judge.parameters())
    for _ in range(steps):
        opt_judge.zero_grad()
        judge(maker(torch.randn(4, 4)).detach()).mean().backward()
        opt_judge.step()
        opt_maker.zero_grad()
        judge(maker(torch.randn(4, 4))).mean().backward()
        opt_maker.step()


def main():
    dist.init_process_group("gloo")
    threading.Thread(target=log, daemon=True).start()
    rank = dist.get_rank()
    maker = DDP(torch.nn.Linear(4, 8))
    judge = DDP(torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)))
    maker.register_comm_hook(None, fp16_compress_hook)
    train(maker, judge, 30)
    dist.barrier()
    del maker, judge  # see training.leave
    dist.destroy_process_group()
    if rank == 0:
        time.sleep(6)


if __name__ == "__main__":
    main()
