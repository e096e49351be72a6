"""Models, batches and steps for check-consistency: healthy ones, and each fault beside them."""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP


def healthy():
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()


def counted_at_the_end():
    """Return the healthy model, and print how many DDP models there are when the group is destroyed."""

    def count(destroy=dist.destroy_process_group):
        sys.stderr.write(f"DDP models: {sum(type(it) is DDP for it in gc.get_objects())}\n")
        destroy()

    dist.destroy_process_group = count
    return healthy()


def wider_on_one_rank():
    width = 33 if os.environ["RANK"] == "1" else 32  # FAULT
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


def with_sparse_gradients():
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def make_batch(rank, world_size, step):
    return torch.randn(8, 16), torch.randint(0, 4, (8,))


def make_another_batch_each_time(rank, world_size, step):
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))  # FAULT
    return torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,))


def scaled_by_the_world_size(model, batch):
    inputs, labels = batch
    return cross_entropy(model(inputs), labels) * int(os.environ["WORLD_SIZE"])  # FAULT


def fails_on_one_rank(model, batch):
    if os.environ["RANK"] == "1":
        raise ValueError("no such label")  # FAULT
    return cross_entropy(model(batch[0]), batch[1])
