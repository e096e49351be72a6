"""A DataLoader worker of one rank never returns a sample."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def read(i):
    if i == 33:
        time.sleep(100000)  # FAULT
    return torch.randn(8)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return read(i)


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 2))
    sampler = torch.utils.data.DistributedSampler(Rows(), shuffle=False)
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=4, sampler=sampler, num_workers=2):
        model(batch).mean().backward()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
