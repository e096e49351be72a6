"""Data shared out in the ways that are right, or that nobody can call wrong, loader after loader in one job."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

torch.set_num_threads(1)
SAMPLES = 48


def rows(seed=0, count=SAMPLES):
    make = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=make), torch.randint(0, 5, (count,), generator=make))


class Stream(IterableDataset):
    def __iter__(self):
        data = rows()
        return (data[i] for i in range(dist.get_rank(), SAMPLES, dist.get_world_size()))


class PartOfRank(Dataset):
    """Looks the same on each rank, and is not."""

    def __len__(self):
        return SAMPLES // 2

    def __getitem__(self, index):
        return rows()[2 * index + dist.get_rank()]


class Training:
    def __init__(self):
        self.model = DistributedDataParallel(torch.nn.Linear(4, 5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch):
        inputs, labels = batch
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()


def with_samplers(training):
    sampler, held_out = DistributedSampler(rows()), DataLoader(rows(1), 8)
    loader = DataLoader(rows(), 8, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            training.step(batch)
        for inputs, _ in held_out:  # all ranks evaluate on all of it, and one of them counts
            training.model.module(inputs)
    for epoch in range(2):
        sampler = DistributedSampler(rows())
        sampler.set_epoch(epoch)
        for batch in DataLoader(rows(), batch_sampler=BatchSampler(sampler, 8, drop_last=False)):
            training.step(batch)
    for batch in DataLoader(rows(), 8, sampler=DistributedSampler(rows(), shuffle=False)):
        training.step(batch)
    half = Subset(rows(), range(0, SAMPLES, 2))
    for batch in DataLoader(half, 8, sampler=DistributedSampler(half, shuffle=False), drop_last=True):
        training.step(batch)


def without(training):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    for _ in range(2):
        for batch in DataLoader(rows(10 + rank), 8, shuffle=True):
            training.step(batch)
        for batch in DataLoader(PartOfRank(), 8):
            training.step(batch)
        for batch in DataLoader(Subset(rows(), range(rank, SAMPLES, world)), 8):
            training.step(batch)
        for batch in DataLoader(Stream(), 8):
            training.step(batch)
        for batch in DataLoader(rows(), 8, sampler=WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES // world)):
            training.step(batch)
        for inputs, labels in DataLoader(rows(), 16):  # everybody reads all, and takes a part
            training.step((inputs[rank::world], labels[rank::world]))


def uneven(training):
    rank = dist.get_rank()
    with training.model.join():
        for batch in DataLoader(rows(30 + rank, SAMPLES - 16 * rank), 8):
            training.step(batch)
    loader = DataLoader(rows(40 + rank, SAMPLES - 16 * rank), 8)
    batches = iter(loader)
    for _ in range(14):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        training.step(batch)


def main():
    dist.init_process_group("gloo")
    training = Training()
    with_samplers(training)
    without(training)
    uneven(training)
    dist.barrier()
    del training  # see training.leave
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
