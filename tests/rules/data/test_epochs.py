"""Samplers whose epoch is never set, and those that need not."""

from dataclasses import replace

from ddpdoctor.diagnose.files import plan_report
from ddpdoctor.model import data
from ddpdoctor.model.data import EpochCall, SamplingPlan
from ddpdoctor.model.stacks import Frame
from tests.golden import table
from tests.rules.build import asking
from tests.rules.data import seen
from tests.rules.data.seen import drawn, loader, sampler, share

unset_epochs = asking("DD702")


def passes(rank, seeds, epochs, **more):
    return [
        drawn(share(96, 2, rank, seed), i, set_epoch=epoch, **more)
        for i, (seed, epoch) in enumerate(zip(seeds, epochs, strict=True), 1)
    ]


def used(rank, seeds, epochs, **more):
    return loader(*passes(rank, seeds, epochs), sampler=sampler(rank, **more))


def remade(rank, **more):
    """Three loaders with a sampler each, one after the other."""
    return tuple(
        loader(replace(epoch, number=1), sampler=sampler(rank), number=i, **more)
        for i, epoch in enumerate(passes(rank, (0, 0, 0), (0, 0, 0)), 1)
    )


def stray(at_ns):
    return (EpochCall(site=Frame(file="/home/me/train.py", line=9, function="main", user=True), time_ns=at_ns),)


def looped(at_ns):
    """A loader of two passes, from 100 to 400 ns, and a call of ``set_epoch`` on a sampler that no loader uses."""
    found = []
    for rank in range(2):
        first, second = passes(rank, (0, 0), (0, 0))
        times = (replace(first, begun_ns=100, ended_ns=200), replace(second, begun_ns=300, ended_ns=400))
        found.append(replace(loader(*times, sampler=sampler(rank)), stray_calls=stray(at_ns)))
    return found


# Ranks that run out of batches, and those that are meant to have fewer.


uneven = asking("DD704")


def used_up(*batches, under_way=False, **more):
    """A loader with passes of so many batches; the last one may be under way."""
    epochs = [drawn(list(range(8 * count)), i) for i, count in enumerate(batches, 1)]
    if under_way:
        epochs[-1] = replace(epochs[-1], complete=False, ended_ns=None)
    return loader(*epochs, samples=None, **more)


# Ranks that train on the same samples, and the many that only seem to.


duplicates = asking("DD701")


def undrawn(*digests, batches=6):
    """A pass over an iterable dataset, of which only batches were seen."""
    nothing = {"drawn": 0, "total": 0, "order": "", "first": "", "batches": batches, "backwards": batches}
    return drawn([], sample_digests=(), batch_digests=digests, **nothing)


def planned(samples, world_size, batch_size, **more):
    """Judge a plan; the report has its findings and checks."""
    plan = SamplingPlan(samples=samples, world_size=world_size, batch_size=batch_size, **more)
    return plan_report(plan, ("ddpdoctor",))


test_rows = table("epochs", vars(data), vars(seen), globals())
