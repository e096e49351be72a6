"""Shares that do not make up the dataset, and those of which that cannot be said."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Confidence
from tests.rules.asking import asking

from .seen import LINE, broken_off, drawn, loader, order, outcome, replicas, sampler, share

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
