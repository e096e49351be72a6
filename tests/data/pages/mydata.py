"""A loader whose sampler has another seed on each rank."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class D(Dataset):
    def __len__(self):
        return 455

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def seeds():
    data = D()
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=dist.get_rank()))
