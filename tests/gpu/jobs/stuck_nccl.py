"""One rank sleeps; the other has begun a reduction on the GPU and stands in item()."""

import os
import time

import torch
import torch.distributed as dist

# NCCL refuses two ranks on one GPU of one host; told that they are two hosts, it takes its sockets between them.
os.environ["NCCL_HOSTID"] = os.environ["RANK"]


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    value = torch.ones(4, device="cuda")
    for step in range(40):
        while dist.get_rank() == 1 and step == 20 and os.environ["SEEDED"] == "1":
            time.sleep(1000)  # FAULT
        dist.all_reduce(value)
        value.sum().item()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
