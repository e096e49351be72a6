"""Rank 1 commits the fault that FAULT names, in a loop of reductions that both ranks follow with item()."""

import atexit
import datetime
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from place import DEVICE, join
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ["FAULT"]


def main():
    if FAULT == "duplicate":  # one GPU for two ranks of one host
        del os.environ["NCCL_HOSTID"]
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")  # FAULT duplicate
        dist.all_reduce(torch.ones(4, device="cuda:0"))  # FAULT duplicate
    if FAULT.startswith("missing"):  # one more rank than was started; "missing_at_once" has NCCL connect at the start
        numbers = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"]) + 1}
        rank = join(at_once=FAULT == "missing_at_once", **numbers)
    elif FAULT == "stall":
        rank = join(timeout=datetime.timedelta(seconds=30))
    else:
        rank = join()
    if rank == 1 and "KERNEL_LOG" in os.environ:  # what NVIDIA's driver will write of the fault of this rank's device
        with open(os.environ["KERNEL_LOG"], "a") as log:
            words = os.environ["XID"].format(pid=os.getpid())
            log.write(
                f"3,1,{time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000},-;NVRM: Xid (PCI:0000:1b:00): {words}\n"
            )
    if FAULT == "model":
        DDP(torch.nn.Linear(4, 4 + rank).to(DEVICE))  # FAULT model
    value, larger = torch.ones(256, device=DEVICE), torch.ones(2**22, device=DEVICE)
    for step in range(20):
        at_fault = rank == 1 and step == 10
        if at_fault and FAULT == "crash":
            raise ValueError("a bad batch")  # FAULT crash
        if at_fault and FAULT == "memory":
            torch.empty(2**46, dtype=torch.uint8, device=DEVICE)  # FAULT memory
        if at_fault and FAULT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)  # FAULT killed
        if at_fault and FAULT == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)  # FAULT stopped
        if FAULT == "fork" and step == 10:
            if rank == 0:
                dist.all_reduce(value)  # FAULT fork
            else:
                dist.broadcast(value, 0)  # FAULT fork
        if at_fault and FAULT == "alone":  # FAULT alone
            dist.broadcast(value, 1)  # FAULT alone
        if at_fault and FAULT == "call":  # FAULT call
            dist.broadcast(value, 0)  # FAULT call
        elif at_fault and FAULT == "size":  # FAULT size
            dist.all_reduce(larger)  # FAULT size
            larger.sum().item()
        else:
            dist.all_reduce(value)  # FAULT stall
        value.sum().item()
    if rank == 1 and FAULT == "aborted":
        os.abort()  # FAULT aborted
    dist.destroy_process_group()
    if rank == 1 and FAULT == "abort_at_exit":
        atexit.register(os.abort)
    if rank == 1 and FAULT == "exit":
        threading.Thread(target=time.sleep, args=(1000,)).start()  # FAULT exit


if __name__ == "__main__":
    main()
