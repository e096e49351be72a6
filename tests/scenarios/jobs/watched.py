"""A job that watches itself: python watched.py FOLDER FAULT [SETTING=VALUE ...]"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpdoctor

torch.set_num_threads(1)
FOLDER, FAULT = sys.argv[1:3]


def fails(rank):
    if rank == 1 and FAULT == "hang":
        time.sleep(100)  # FAULT
    if rank == 1 and FAULT == "crash":
        raise KeyError("sample 7")  # FAULT


def train():
    model = DDP(torch.nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        opt.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        opt.step()
        if step == 20:
            fails(dist.get_rank())
        all_reduce(torch.ones(1))


def main():
    before = dict(os.environ)
    dist.init_process_group("gloo")  # the group is there before the watch begins
    with ddpdoctor.watch(hang_timeout=4, on_hang="kill", report_dir=FOLDER), ddpdoctor.watch():
        train()
        if FAULT == "interrupted":
            sys.stdout.write("trains\n")  # in one piece, which print does not do where output is unbuffered
            sys.stdout.flush()
            time.sleep(100)
    if FAULT == "afterwards" and dist.get_rank() == 1:
        time.sleep(6)
    dist.barrier()
    dist.destroy_process_group()
    changed = {name for name in before.keys() | os.environ if before.get(name) != os.environ.get(name)}
    unexpected = sorted(changed - {"DDPDOCTOR_GIVEN", "DDPDOCTOR_JOINED", "DDPDOCTOR_MASTER", "DDPDOCTOR_RANK_PID"})
    sys.stdout.write(" ".join(["left", *unexpected]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
