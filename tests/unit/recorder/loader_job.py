"""Loops over loaders as scripts do, one case after another in one process.

Arguments are names of cases. Prints, as JSON by name, when each began and what it has to tell itself.
"""

import json
import os
import sys
import time
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


def of(data=None, batch_size=4, **options):
    return DataLoader(rows() if data is None else data, batch_size=batch_size, **options)


def over(*loaders, passes=1, only=None, each=backward):
    """Go over loaders, and do something for each batch; leave after so many of them."""
    for loader in loaders:
        for _ in range(passes):
            for number, _ in enumerate(loader, 1):
                each()
                if number == only:
                    break


def nothing():
    """Do nothing."""


def split():
    for seed in (1, 1, 2):
        part, _ = random_split(rows(), (12, 8), generator=torch.Generator().manual_seed(seed))
        over(of(part))


def words_as_indices():
    over(of(Named(), 2, sampler=Fixed(["a", "bb", "ccc", "dddd"])))
    return Named.touched


def evaluated():
    with torch.no_grad():
        over(of(), each=nothing)
    backward()


def evaluated_with_gradients():
    over(of(), each=nothing)
    backward()


def evaluation_left_early():
    over(of(), only=3, each=nothing)
    backward()
    backward()


def made_again():
    for _ in range(3):
        over(of(), only=2)


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
    over(of(sampler=sampler, drop_last=True))


def in_a_sampler_of_batches():
    sampler = DistributedSampler(rows(), num_replicas=2, rank=0, shuffle=False)
    over(DataLoader(rows(), batch_sampler=BatchSampler(sampler, 5, drop_last=False)))


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
    over(of(sampler=DistributedSampler(Listed(Turns(range(20))), num_replicas=2, rank=1, shuffle=False)))


def divided_by_a_dataset():
    for rank, values in ((0, [1.0, 2.0]), (1, [1.0, 2.0]), (1, [3.0, 4.0])):
        over(of(Shard(values, rank, 2), 2))


def views():
    whole = torch.ones(20, 2).cumsum(0)
    for part in (whole[1::2], whole[10:], whole.clone(), whole[:, :1]):
        over(of(TensorDataset(part)))


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


def held():
    """Hold the iterator of a loader that is gone, as a traceback and a look at a frame do, while others come."""
    iterator = iter(of())
    next(iterator)
    for _ in range(20):
        over(of(rows(4)))


def very_many():
    for _ in range(250):
        over(of(rows(4)), each=nothing)
    over(of(rows(4)), passes=300, each=nothing)


CASES = {
    "plain": lambda: over(of(), passes=2),
    "persistent": lambda: over(of(num_workers=1, persistent_workers=True), passes=2),
    "one_by_one": lambda: over(of(batch_size=None)),
    "lists_as_indices": lambda: over(of(batch_size=None, sampler=BatchSampler(Fixed(range(20)), 4, drop_last=False))),
    "tensors_as_indices": lambda: over(of(sampler=Fixed(torch.arange(19, -1, -1)))),
    "stream": lambda: over(of(Stream())),
    "left_early": lambda: over(of(), passes=2, only=2),
    "divided_as_a_stream": lambda: over(of(Ranked(1), 2)),
    "parts": lambda: [
        over(of(torch.utils.data.Subset(rows(), indices))) for indices in (range(1, 20, 2), [0, 2, 4, 6], [3, 1, 2])
    ],
    "constant": lambda: over(of(TensorDataset(torch.zeros(8, 3)))),
    "many_passes": lambda: over(of(rows(4)), passes=40),
}
"""Cases that are no functions of their names."""


if __name__ == "__main__":
    told = {}
    for name in sys.argv[1:]:
        began_ns = time.monotonic_ns()
        told[name] = began_ns, (CASES.get(name) or globals()[name])()
    print(json.dumps(told))
