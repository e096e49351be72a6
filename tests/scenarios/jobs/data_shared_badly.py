"""Data shared out in ways that are wrong and that nothing complains of, loader after loader in one job."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from training import run

SAMPLES = 45


def rows():
    make = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=make), torch.randint(0, 5, (SAMPLES,), generator=make))


class Augmented(Dataset):
    """Other inputs on each rank, from the same samples."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        inputs, label = rows()[index]
        return inputs + torch.randn(4), label


def main():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    for batch in DataLoader(Augmented(), 8, shuffle=True):  # FAULT duplicate-data
        step(batch)

    same_share = DistributedSampler(rows(), num_replicas=3, rank=1)
    for batch in DataLoader(rows(), 8, sampler=same_share):  # FAULT duplicate-data
        step(batch)

    own_part = Subset(rows(), range(rank, SAMPLES, 3))
    for batch in DataLoader(own_part, 2, sampler=DistributedSampler(own_part)):  # FAULT shard-gap
        step(batch)

    never_set = DataLoader(rows(), 8, sampler=DistributedSampler(rows()))
    for _ in range(2):
        for batch in never_set:  # FAULT no-set-epoch
            step(batch)

    for _ in range(2):
        for batch in DataLoader(rows(), 4, sampler=DistributedSampler(rows())):  # FAULT no-set-epoch
            step(batch)

    loader, other = DataLoader(rows(), 8, sampler=DistributedSampler(rows())), DistributedSampler(rows())
    for epoch in range(3):
        other.set_epoch(epoch)  # FAULT no-set-epoch
        for batch in loader:
            step(batch)

    own_seed = DistributedSampler(rows(), seed=7 if rank == 1 else 3)
    for epoch in range(2):
        own_seed.set_epoch(epoch)
        for batch in DataLoader(rows(), 8, sampler=own_seed):  # FAULT shard-gap of rank 1
            step(batch)


run(main)
