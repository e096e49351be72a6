"""Shares that do not make up the dataset, and those of which that cannot be said."""

import functools
import itertools
import operator
from dataclasses import replace

import pytest

from ddpdoctor.model.data import Chosen, Cut, Drawn, Pass, RankPass
from ddpdoctor.model.findings import Confidence, Severity
from tests.rules.build import asking
from tests.rules.data.seen import LINE, TORCHS, broken_off, drawn, loader, order, outcome, replicas, sampler, share

gaps = asking("DD703")

OTHERS = {"standard": False, "type": "mine.Sampler"}


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


ACCELERATES = "accelerate.data_loader.BatchSamplerShard"
READS_FOR_ALL = "accelerate.data_loader.DataLoaderDispatcher"
LIGHTNINGS = "lightning.fabric.utilities.distributed.DistributedSamplerWrapper"


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


OWN = ("dataset", "mine.Stream")
TWICE = {
    "a sampler, then prepare": (twice(ACCELERATES, TORCHS), "480 of 960", Confidence.HIGH),
    "four ranks": (twice(ACCELERATES, TORCHS, world=4), "240 of 960", Confidence.HIGH),
    "a sampler, then prepare, broken off": (
        [replace(one, epochs=(broken_off(one.epochs[0]),)) for one in twice(ACCELERATES, TORCHS)],
        "480 of 960",
        Confidence.HIGH,
    ),
    "a sampler without attributes in Lightning's, which ends before the loader does": (
        [
            replace(one, epochs=(replace(one.epochs[0], complete=False),), sampler=replace(one.sampler, planned=240))
            for one in twice(LIGHTNINGS, "mine.Sampler", knows=False)
        ],
        "480 of 960",
        Confidence.HIGH,
    ),
    "every second index": (parts(range(0, 960, 2), range(1, 960, 2)), "480 of 960", Confidence.HIGH),
    "one half each": (parts(range(480), range(480, 960)), "480 of 960", Confidence.HIGH),
    "random halves": (parts(order(960, 5)[:480], order(960, 5)[480:]), "480 of 960", Confidence.HIGH),
    "thirds without the rest": (parts(range(319), range(319, 638), range(638, 957)), "321 of 960", Confidence.HIGH),
    "views of one tensor": (
        [
            replace(one, part="", chosen=replace(one.chosen, total=None, xor=None))
            for one in parts(range(0, 960, 2), range(1, 960, 2))
        ],
        "480 of 960",
        Confidence.HIGH,
    ),
    "a dataset that divides itself": (holding("x", "y"), "480 of 960", Confidence.MEDIUM),
    "a stream in accelerate's": (
        streams(("dataset", "accelerate.data_loader.IterableDatasetShard"), OWN),
        "about 1 of 2",
        Confidence.MEDIUM,
    ),
    "a stream that rank 0 reads for all": (
        streams(("loader", READS_FOR_ALL), OWN, knows=False, reads=(True, False)),
        "about 1 of 2",
        Confidence.MEDIUM,
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_data_divided_twice_names_all_ranks_and_how_much_they_see(name):
    loaders, count, confidence = TWICE[name]
    (finding,) = gaps(replicas(*loaders)).findings
    assert (finding.code, finding.ranks, finding.confidence) == ("DD703", tuple(range(len(loaders))), confidence)
    assert f"{count} samples" in finding.summary
    assert "divided among the ranks twice" in finding.summary


FIXES = {
    "a sampler, then prepare": "remove sampler=DistributedSampler(...) from the DataLoader: accelerate's prepare()",
    "a sampler without attributes in Lightning's, which ends before the loader does": "use_distributed_sampler=False",
    "one half each": "because each rank has its own part already; or pass the whole dataset",
    "a stream that rank 0 reads for all": "let Stream give all samples on every rank",
}


@pytest.mark.parametrize("name", FIXES)
def test_the_fix_removes_one_of_the_two_places(name):
    (finding,) = gaps(replicas(*TWICE[name][0])).findings
    assert FIXES[name] in finding.fix


ONCE = {
    "one place": twice(TORCHS, drew=lambda rank: share(960, 2, rank)),
    "two places by name, one by what was drawn": twice(ACCELERATES, TORCHS, drew=lambda rank: share(960, 2, rank)),
    "two places by name, and nothing was counted": [
        replace(one, epochs=(broken_off(one.epochs[0]),)) for one in twice(ACCELERATES, "mine.Sampler")
    ],
    "half of the samples, on purpose": twice(ACCELERATES, drew=lambda rank: order(960, rank)[:240]),
    "too few to tell from the last batch": [
        replace(one, batch_size=400) for one in twice(ACCELERATES, TORCHS)
    ],
    "nodes, then ranks of a node": [
        replace(one, cuts=(cut("sampler", ACCELERATES, rank % 2), cut("sampler", TORCHS, rank // 2)))
        for rank, one in enumerate(twice(ACCELERATES, TORCHS, world=4, drew=lambda rank: share(960, 4, rank)))
    ],
    "the same part on all ranks": parts(range(480), range(480)),
    "views that overlap": [
        replace(one, part="", chosen=replace(one.chosen, total=None, xor=None))
        for one in parts(range(480), range(479, 959))
    ],
    "parts that overlap": parts(range(480), range(479, 959)),
    "parts of other data": [
        replace(one, part_of=str(rank)) for rank, one in enumerate(parts(range(480), range(480, 960)))
    ],
    "a dataset that knows its rank and holds the same": holding("x", "x"),
    "a dataset that cannot be read": holding("", ""),
    "a stream divided once": streams(("dataset", "accelerate.data_loader.IterableDatasetShard")),
    "a stream that divides itself": streams(OWN),
    "a rank with other places": [twice(ACCELERATES, TORCHS)[0], twice(ACCELERATES)[1]],
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_data_divided_once_is_not_taken_for_twice(name):
    assert all("twice" not in finding.summary for finding in gaps(replicas(*ONCE[name])).findings)


def test_without_ddp_only_data_divided_twice_is_judged():
    assert outcome(gaps(replicas(*twice(ACCELERATES, TORCHS), by_model=False))) == (0, 1)
    assert outcome(gaps(replicas(*FAULTS["seeds"][0], by_model=False))) == "skipped"


def test_ranks_that_were_not_seen_may_have_another_loader():
    assert outcome(gaps(replicas(*twice(ACCELERATES, TORCHS), size=3))) == "skipped"


FAULTS = {
    "seeds": ([used(rank, rank) for rank in range(2)], (0, 1)),
    "one seed of three": ([used(rank, 7 if rank == 1 else 0, world=3) for rank in range(3)], (1,)),
    "epochs": ([used(rank, 0, rank) for rank in range(2)], (0, 1)),
    "one epoch of four": ([used(rank, 0, 3 if rank == 2 else 4, world=4) for rank in range(4)], (2,)),
    "seed and epoch of two of three make up for each other": (
        [used(0, 0, 1, world=3), used(1, 1, 0, world=3), used(2, 1, 1, world=3)],
        (2,),
    ),
    "seeds, broken off": (
        [replace(used(rank, rank), epochs=(broken_off(used(rank, rank).epochs[0]),)) for rank in range(2)],
        (0, 1),
    ),
    "padded": ([used(rank, rank, samples=455) for rank in range(2)], (0, 1)),
    "another library's sampler": ([used(rank, rank, **OTHERS) for rank in range(2)], (0, 1)),
    "a sampler for more ranks": (
        [loader(drawn(share(96, 4, rank)), sampler=sampler(rank, 4)) for rank in range(2)],
        (0, 1),
    ),
    "parts split off at random": (split("x", "y"), (0, 1)),
    "one part of three": (split("x", "x", "y"), (2,)),
    "parts, not shuffled": (split("x", "y", shuffle=False), (0, 1)),
    "the same shares by hand, which overlap": (by_hand(order(96, 1)[0::2], order(96, 2)[1::2]), (0, 1)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_shares_that_leave_samples_out_are_found(name):
    loaders, blamed = FAULTS[name]
    (finding,) = gaps(replicas(*loaders)).findings
    assert (finding.code, finding.kind, finding.ranks) == ("DD703", "shard-gap", blamed)
    assert [(place.rank, place.line) for place in finding.where] == [(rank, LINE) for rank in blamed]


def test_the_minority_is_sure_and_of_two_it_is_said_that_nobody_is():
    (sure,) = gaps(replicas(*FAULTS["one seed of three"][0])).findings
    (unsure,) = gaps(replicas(*FAULTS["seeds"][0])).findings
    assert (sure.confidence, unsure.confidence) == (Confidence.HIGH, Confidence.MEDIUM)
    assert "there is no majority, so it is unknown which rank is wrong" in unsure.evidence
    assert "seeds: 0 on rank 0, 1 on rank 1 (pass 1)" in unsure.evidence


def test_a_split_of_its_own_on_each_rank_is_reported_with_what_to_do():
    (found,) = gaps(replicas(*FAULTS["parts split off at random"][0])).findings
    assert "the ranks use different parts (Subset) of the dataset" in found.summary
    assert "random_split(..., generator=" in found.fix


HEALTHY = {
    "parts split alike": (split("x", "x"), "passed"),
    "parts of what cannot be looked into": (split("x", "y", part_of=""), "passed"),
    "parts of each rank's own data": (
        [replace(one, part_of=str(i)) for i, one in enumerate(split("x", "y"))],
        "passed",
    ),
    "a part that cannot be looked into": (split("x", ""), "passed"),
    "parts of which another library shares out": (split("x", "y", **OTHERS), "passed"),
    "shares": ([used(rank) for rank in range(2)], "passed"),
    "padded shares": ([used(rank, samples=455) for rank in range(2)], "passed"),
    "shares of another library": ([used(rank, **OTHERS) for rank in range(2)], "passed"),
    "seeds that differ and no shuffle": ([used(rank, rank, shuffle=False) for rank in range(2)], "passed"),
    "seed and epoch that make up for each other": ([used(rank, rank, 1 - rank) for rank in range(2)], "passed"),
    "other seeds, the same shares": (
        [replace(used(rank), sampler=sampler(rank, seed=rank, **OTHERS)) for rank in range(2)],
        "passed",
    ),
    "other seeds, and it cannot be proved": (
        [replace(used(rank, rank, **OTHERS), epochs=(broken_off(used(rank, rank).epochs[0]),)) for rank in range(2)],
        "skipped",
    ),
    "by hand, all": (by_hand(list(range(0, 96, 2)), list(range(1, 96, 2))), "passed"),
    "by hand, in one pass only": (by_hand(order(96, 1)[0::2], order(96, 2)[1::2], passes=1), "skipped"),
    "by hand, with replacement": (by_hand([1, 1, *range(46)], [2, 2, *range(46)]), "skipped"),
    "by hand, not as many as there are": (by_hand(list(range(0, 90, 2)), list(range(1, 90, 2))), "skipped"),
    "indices of something else": (by_hand(list(range(100, 148)), list(range(200, 248))), "skipped"),
    "at random on each rank": (
        [loader(drawn(order(96, r)[:48]), drawn(order(96, r + 9)[:48], 2)) for r in range(2)],
        "skipped",
    ),
    "other lengths": ([used(0, samples=96), used(1, 1, samples=90)], "skipped"),
    "no indices": ([replace(used(rank, rank), indices_seen=False) for rank in range(2)], "skipped"),
    "not trained": (
        [loader(drawn(share(96, 2, r, r), trained=False, backwards=0), sampler=sampler(r, seed=r)) for r in range(2)],
        "skipped",
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_shares_that_make_up_the_dataset_or_may_are_no_alarm(name):
    loaders, expected = HEALTHY[name]
    assert outcome(gaps(replicas(*loaders))) == expected


def test_a_rank_that_was_not_seen_may_have_drawn_the_rest():
    seen = [loader(drawn(share(96, 4, rank)), sampler=sampler(rank, 4)) for rank in range(2)]
    assert outcome(gaps(replicas(*seen, size=4))) == "skipped"


def test_a_group_of_a_larger_job_may_share_out_over_all_of_it():
    seen = [loader(drawn(share(96, 4, rank)), sampler=sampler(rank, 4)) for rank in range(2)]
    assert outcome(gaps(replicas(*seen, world_size=4))) == "passed"


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


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (counted(96), "passed"),
        (counted(90, shared=6, missed=6), (0, 1)),
        (counted(96, shared=4, each=50), "passed"),  # padding draws again and misses nothing
        (counted(90, missed=6, each=45), "passed"),  # a last batch that is dropped misses and draws nothing again
        (counted(90, shared=6, missed=6, repeated=6), "skipped"),  # with replacement
        (counted(48, shared=48, missed=48, alike=((0, 1),)), "passed"),  # another rule's finding
        (counted(90, shared=6, missed=6, content="ab"), "skipped"),  # equal indices of different data
        (counted(None, missed=None), "passed"),
    ],
)
def test_samples_that_were_counted_show_overlaps_that_no_sum_shows(seen, expected):
    assert outcome(gaps(seen)) == expected


def test_an_overlap_is_said_with_its_numbers():
    (finding,) = gaps(counted(90, shared=6, missed=6)).findings
    assert (finding.severity, finding.confidence) == (Severity.WARNING, Confidence.MEDIUM)
    assert finding.summary == "in pass 1, the ranks draw 6 samples too often and miss as many others"
    assert finding.evidence[0] == (
        "counted in pass 1: 96 drawn, 90 of them different, 6 drawn by two or more ranks, 6 not drawn"
    )
