"""Loops over loaders as scripts do, each case in a function of its own, in one process.

Arguments are names of cases. Prints what the cases themselves have to tell, as JSON by name.
"""

import json
import os
import sys
import traceback

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    random_split,
)

torch.set_num_threads(1)
MODEL = torch.nn.Linear(1, 1)


def rows(count=20):
    return TensorDataset(torch.arange(float(count)).view(-1, 1), torch.arange(count) % 5)


def backward():
    MODEL(torch.ones(1, 1)).sum().backward()


class Fixed(torch.utils.data.Sampler):
    def __init__(self, indices):
        self.indices = indices

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class Named(Dataset):
    """Has words for indices, and attributes that must not be touched."""

    touched = 0

    def __len__(self):
        return 4

    def __getitem__(self, word):
        return {"word": word, "length": len(word)}

    @property
    def trap(self):
        Named.touched += 1
        raise RuntimeError

    def __getattr__(self, name):
        Named.touched += 1
        raise AttributeError(name)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0).view(-1, 1))


def plain():
    loader = DataLoader(rows(), batch_size=4)
    for _ in range(2):
        for _ in loader:
            backward()


def split():
    for seed in (1, 1, 2):
        part, _ = random_split(rows(), (12, 8), generator=torch.Generator().manual_seed(seed))
        for _ in DataLoader(part, batch_size=4):
            backward()


def persistent():
    loader = DataLoader(rows(), batch_size=4, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for _ in loader:
            backward()


def one_by_one():
    for _ in DataLoader(rows(), batch_size=None):
        backward()


def lists_as_indices():
    for _ in DataLoader(rows(), sampler=BatchSampler(Fixed(range(20)), 4, drop_last=False), batch_size=None):
        backward()


def tensors_as_indices():
    for _ in DataLoader(rows(), batch_size=4, sampler=Fixed(torch.arange(19, -1, -1))):
        backward()


def words_as_indices():
    for _ in DataLoader(Named(), batch_size=2, sampler=Fixed(["a", "bb", "ccc", "dddd"])):
        backward()
    return Named.touched


def stream():
    for _ in DataLoader(Stream(), batch_size=4):
        backward()


def evaluated():
    with torch.no_grad():
        for _ in DataLoader(rows(), batch_size=4):
            pass
    backward()


def evaluated_with_gradients():
    for _ in DataLoader(rows(), batch_size=4):
        pass
    backward()


def left_early():
    loader = DataLoader(rows(), batch_size=4)
    for _ in range(2):
        for i, _ in enumerate(loader):
            backward()
            if i == 1:
                break


def evaluation_left_early():
    for i, _ in enumerate(DataLoader(rows(), batch_size=4)):
        if i == 2:
            break
    backward()
    backward()


def made_again():
    for _ in range(3):
        for i, _ in enumerate(DataLoader(rows(), batch_size=4)):
            backward()
            if i == 1:
                break


def two_at_once():
    batches = iter(DataLoader(rows(16), batch_size=4))
    for _ in range(2):
        next(batches), next(batches)
        backward()
        backward()
    next(batches, None)


def distributed():
    sampler = DistributedSampler(rows(), num_replicas=3, rank=1, seed=5, drop_last=True)
    sampler.set_epoch(4)
    for _ in DataLoader(rows(), batch_size=4, sampler=sampler, drop_last=True):
        backward()


def in_a_sampler_of_batches():
    sampler = DistributedSampler(rows(), num_replicas=2, rank=0, shuffle=False)
    for _ in DataLoader(rows(), batch_sampler=BatchSampler(sampler, 5, drop_last=False)):
        backward()


class Turns(torch.utils.data.Sampler):
    """Divides the indices by itself, and keeps no number of ranks."""

    def __init__(self, indices):
        rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "2"))
        self.mine = indices[rank::world]

    def __iter__(self):
        return iter(self.mine)

    def __len__(self):
        return len(self.mine)


class Listed:
    """Stands for a sampler as a dataset of its indices."""

    def __init__(self, sampler):
        self._sampler = sampler

    def __len__(self):
        return len(self._sampler)


class Shard(Dataset):
    def __init__(self, values, rank, world_size):
        self.rank, self.world_size, self.values = rank, world_size, values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


class Ranked(IterableDataset):
    def __init__(self, number):
        self._rank, self._world_size = number, 2

    def __iter__(self):
        return iter(torch.arange(8.0).view(-1, 1)[self._rank :: self._world_size])


def divided_by_samplers():
    outer = DistributedSampler(Listed(Turns(range(20))), num_replicas=2, rank=1, shuffle=False)
    for _ in DataLoader(rows(), batch_size=4, sampler=outer):
        backward()


def divided_by_a_dataset():
    for rank, values in ((0, [1.0, 2.0]), (1, [1.0, 2.0]), (1, [3.0, 4.0])):
        for _ in DataLoader(Shard(values, rank, 2), batch_size=2):
            backward()


def divided_as_a_stream():
    for _ in DataLoader(Ranked(1), batch_size=2):
        backward()


def parts():
    for indices in (range(1, 20, 2), [0, 2, 4, 6], [3, 1, 2]):
        for _ in DataLoader(torch.utils.data.Subset(rows(), indices), batch_size=4):
            backward()


def views():
    whole = torch.ones(20, 2).cumsum(0)
    for part in (whole[1::2], whole[10:], whole.clone(), whole[:, :1]):
        for _ in DataLoader(TensorDataset(part), batch_size=4):
            backward()


def constant():
    for _ in DataLoader(TensorDataset(torch.zeros(8, 3)), batch_size=4):
        backward()


def failing():
    """Return the files in the traceback of an error that a dataset raises."""

    class Bad(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise LookupError(index)

    try:
        for _ in DataLoader(Bad()):
            pass
    except LookupError as error:
        return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def many_passes():
    loader = DataLoader(rows(4), batch_size=4)
    for _ in range(40):
        for _ in loader:
            backward()


def very_many():
    for _ in range(400):
        for _ in DataLoader(rows(4), batch_size=4):
            pass
    loader = DataLoader(rows(4), batch_size=4)
    for _ in range(2000):
        for _ in loader:
            pass


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
