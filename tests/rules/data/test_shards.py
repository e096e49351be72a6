"""Shares that do not make up the dataset, and those of which that cannot be said."""

import functools
import itertools
import operator
from dataclasses import replace

from ddpdoctor.model.data import Chosen, Cut, Drawn, Pass, RankPass
from tests.golden import table
from tests.rules.build import asking
from tests.rules.data import seen
from tests.rules.data.seen import TORCHS, drawn, loader, replicas, sampler, share

gaps = asking("DD703")


def used(rank, seed=0, epoch=0, *, samples=96, world=2, count=1, **more):
    """A rank's loader whose sampler has this seed and epoch, in a few passes."""
    shuffle = more.get("shuffle", True)
    epochs = [
        drawn(share(samples, world, rank, seed + epoch, shuffle=shuffle), i, set_epoch=epoch)
        for i in range(1, count + 1)
    ]
    return loader(*epochs, sampler=sampler(rank, world, seed=seed, **more), samples=samples)


def split(*parts, part_of="all", **more):
    """Loaders of which each shares out a part of the dataset, by what torch's sampler says."""
    ranks = enumerate(parts)
    return [replace(used(rank, world=len(parts), **more), part_of=part_of, part=part) for rank, part in ranks]


def by_hand(*shares, passes=2, **more):
    """Loaders whose samplers say nothing, with these shares in each pass."""
    return [loader(*[drawn(indices, i) for i in range(1, passes + 1)], **more) for indices in shares]


def cut(what, kind, rank, count=2):
    return Cut(what=what, type=kind, replicas=count, rank=rank)


def twice(*kinds, world=2, drew=None, knows=True, **more):
    """Loaders whose samplers of these classes each divide 960 samples; a rank draws a share of a share."""
    found = []
    for rank in range(world):
        indices = share(960, world, rank, shuffle=False)[rank::world] if drew is None else drew(rank)
        cuts = [cut("sampler", kind, rank if knows or not at else None, world) for at, kind in enumerate(kinds)]
        used = sampler(rank, world, type=kinds[0], standard=False)
        fields = {"sampler": used, "samples": 960, "cuts": tuple(cuts)}
        found.append(loader(drawn(indices), **(fields | more)))
    return found


def parts(*chosen, of=960, **more):
    """Loaders with a Subset of these indices, of which torch's sampler draws a share."""
    found = []
    for rank, indices in enumerate(chosen):
        steps = {b - a for a, b in itertools.pairwise(indices)}
        start, step = (indices[0], steps.pop()) if len(steps) == 1 else (None, None)
        xor = functools.reduce(operator.xor, indices)
        one = Chosen(of=of, count=len(indices), total=sum(indices), xor=xor, start=start, step=step)
        world = len(chosen)
        cuts = (cut("sampler", TORCHS, rank, world),)
        made = used(rank, world=world, samples=len(indices), shuffle=False)
        found.append(replace(made, cuts=cuts, chosen=one, part_of="all", part=str(rank), **more))
    return found


def holding(*held, kind="mine.Shard", count=2):
    """Loaders whose dataset knows its rank and holds these values, shared out again by torch's sampler."""
    found = [replace(one, part_of="") for one in parts(range(480), range(480))]
    cuts = [(cut("sampler", TORCHS, rank), cut("dataset", kind, rank, count)) for rank in range(2)]
    return [replace(one, held=what, cuts=both) for one, what, both in zip(found, held, cuts, strict=True)]


def streams(*kinds, knows=True, reads=(True, True), **more):
    """Loaders of a dataset without indices, divided at these places."""
    found = []
    for rank, comes in enumerate(reads):
        cuts = tuple(cut(*kind, rank if knows else None, 2 if knows else None) for kind in kinds)
        passes = [drawn([], batches=40, backwards=20)] if comes else []
        found.append(loader(*passes, samples=None, iterable=True, indices_seen=False, cuts=cuts, **more))
    return found


def counted(unique, *, shared=0, missed=0, each=48, repeated=0, alike=(), content=None):
    """Two ranks whose sums fit, and what check-data counted of the samples that they drew."""
    rows = tuple(
        RankPass(rank=n, drawn=each, repeated=repeated, batches=6, last_batch=8, complete=True) for n in (0, 1)
    )
    one = Pass(number=1, ranks=rows, unique=unique, shared=shared, missed=missed, alike=alike)
    seen = Drawn(
        world_size=2, function="m:f", samples=96, kind="DataLoader", dataset="D", sampler="", batch_size=8,
        passes=(one,), set_epoch=True,
    )  # fmt: skip
    loaders = [used(rank) for rank in (0, 1)]
    if content:
        own = [drawn(range(96), content=content[rank]) for rank in (0, 1)]
        loaders = [loader(own[rank], dataset_digest=content[rank]) for rank in (0, 1)]
    return replicas(*loaders, drawn=seen)


test_rows = table("shards", vars(seen), globals())
