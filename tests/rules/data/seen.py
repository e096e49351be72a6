"""Makes what ranks saw of a loader: samplers that share out as torch's do, and what their passes draw and deliver."""

import functools
import operator
import random
from dataclasses import replace

from ddpdoctor.model.data import EpochSeen, LoaderSeen, SamplerSeen
from ddpdoctor.model.stacks import Frame
from ddpdoctor.rules.data.shared import Replicas

TORCHS = "torch.utils.data.distributed.DistributedSampler"
LINE = 12


def order(samples, seed, *, shuffle=True):
    """All indices, in the order of a seed."""
    indices = list(range(samples))
    if shuffle:
        random.Random(seed).shuffle(indices)
    return indices


def share(samples, replicas, rank, seed=0, *, shuffle=True):
    """What torch's sampler draws on a rank, up to the random numbers."""
    indices = order(samples, seed, shuffle=shuffle)
    indices += indices[: -samples % replicas]
    return indices[rank::replicas]


def digests_of(indices, content, leaves=2):
    """Digests of samples as a dataset of this content gives them."""
    return tuple(f"{i}:{leaf}:{content}-{leaf}-{i}" for i in indices for leaf in range(leaves))


def drawn(indices, number=1, *, batch=8, content="same", **more):
    """A pass that came to its end and trained on each batch."""
    batches = -(-len(indices) // batch)
    first = [indices[i * batch : (i + 1) * batch] for i in range(min(batches, 4))]
    fields = {
        "number": number, "set_epoch": None, "batches": batches, "drawn": len(indices), "total": sum(indices),
        "xor": functools.reduce(operator.xor, indices, 0), "order": str(indices), "first": str(indices[:batch]),
        "complete": True, "trained": True, "backwards": batches, "highest": max(indices, default=-1),
        "repeats": len(indices) - len(set(indices)),
        "sample_digests": digests_of([i for i in indices if i % 20 == 0], content),
        "batch_digests": tuple(f"{leaf}:{content}-{leaf}-{part}" for part in first for leaf in range(2)),
        "begun_ns": number * 100, "ended_ns": number * 100 + 50,
    }  # fmt: skip
    return EpochSeen(**(fields | more))


def broken_off(epoch, batches=3):
    """The same pass, left by the script after some batches."""
    return replace(epoch, complete=False, batches=batches, backwards=batches)


def sampler(rank=0, replicas=2, **more):
    fields = {"type": TORCHS, "replicas": replicas, "rank": rank, "seed": 0, "shuffle": True, "drop_last": False}
    return SamplerSeen(**(fields | {"standard": True} | more))


def loader(*epochs, **more):
    fields = {
        "number": 1, "site": Frame(file="/home/me/train.py", line=LINE, function="main", user=True),
        "dataset": "torch.utils.data.dataset.TensorDataset", "dataset_digest": "d", "samples": 96, "batch_size": 8,
        "drop_last": False, "iterable": False, "workers": 0, "indices_seen": True, "sampler": None, "epochs": epochs,
        "passes": len(epochs), "trained_batches": sum(epoch.backwards for epoch in epochs),
    }  # fmt: skip
    return LoaderSeen(**(fields | more))


def replicas(*loaders, size=None, world_size=None, **more):
    """A group of ranks, each of which used one loader, or those of a tuple."""
    by_rank = {rank: used if isinstance(used, tuple) else (used,) for rank, used in enumerate(loaders)}
    size = size or len(loaders)
    return Replicas(loaders=by_rank, size=size, world_size=world_size or size, **more)
