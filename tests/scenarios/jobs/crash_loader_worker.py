"""A DataLoader worker of one rank raises."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


def read(i):
    if i == 45:
        raise KeyError(f"sample {i}")  # FAULT
    return torch.randn(8)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return read(i)


def main():
    model = DDP(torch.nn.Linear(8, 2))
    sampler = torch.utils.data.DistributedSampler(Rows(), shuffle=False)
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=4, sampler=sampler, num_workers=2):
        model(batch).mean().backward()


if __name__ == "__main__":
    run(main)
