"""Samplers whose epoch is never set, and those that need not."""

from dataclasses import replace

import pytest

from ddpdoctor.model.data import EpochCall
from ddpdoctor.model.stacks import Frame
from tests.rules.asking import asking

from .seen import LINE, broken_off, drawn, loader, outcome, replicas, sampler, share

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


FAULTS = {
    "never set": [used(rank, (0, 0), (0, 0)) for rank in range(2)],
    "never set from what it was": [used(rank, (5, 5, 5), (5, 5, 5)) for rank in range(2)],
    "broken off": [loader(*map(broken_off, passes(rank, (0, 0), (0, 0))), sampler=sampler(rank)) for rank in range(2)],
    "made anew each time": [remade(rank) for rank in range(2)],
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_order_in_each_epoch_is_found(name):
    (finding,) = unset_epochs(replicas(*FAULTS[name])).findings
    assert (finding.code, finding.kind, finding.ranks) == ("DD702", "no-set-epoch", (0, 1))
    assert [(place.rank, place.line) for place in finding.where] == [(0, LINE), (1, LINE)]


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


def test_a_call_on_another_sampler_is_named():
    (finding,) = unset_epochs(replicas(*looped(250))).findings
    assert "train.py:9 calls set_epoch on another sampler, not that of the DataLoader (" in finding.summary
    assert [(place.rank, place.line) for place in finding.where] == [(0, 9), (1, 9), (0, LINE), (1, LINE)]
    assert "pass that sampler to the DataLoader" in finding.fix


@pytest.mark.parametrize("at_ns", [50, 500])
def test_a_call_before_or_after_the_loop_has_no_part_in_it(at_ns):
    (finding,) = unset_epochs(replicas(*looped(at_ns))).findings
    assert "never calls set_epoch" in finding.summary


def test_a_call_on_another_sampler_is_no_fault_where_the_order_changes():
    found = [replace(used(rank, (0, 1), (0, 1)), stray_calls=stray(0)) for rank in range(2)]
    assert unset_epochs(replicas(*found)).findings == ()


HEALTHY = {
    "set": ([used(rank, (0, 1), (0, 1)) for rank in range(2)], "passed"),
    "shuffled by something else": ([used(rank, (0, 1), (0, 0)) for rank in range(2)], "passed"),
    "set on one rank": ([used(0, (0, 1), (0, 1)), used(1, (0, 0), (0, 0))], "passed"),
    "one pass": ([used(rank, (0,), (0,)) for rank in range(2)], "skipped"),
    "no shuffle": ([used(rank, (0, 0), (0, 0), shuffle=False) for rank in range(2)], "skipped"),
    "no distributed sampler": ([loader(*passes(0, (0, 0), (0, 0))) for _ in range(2)], "skipped"),
    "a sampler without epochs": ([used(rank, (0, 0), (None, None)) for rank in range(2)], "skipped"),
    "evaluation": (
        [
            loader(*passes(rank, (0, 0), (0, 0), trained=False, backwards=0), sampler=sampler(rank))
            for rank in range(2)
        ],
        "skipped",
    ),
    "two loaders at once": (
        [
            tuple(
                loader(replace(passes(rank, (0,), (0,))[0], ended_ns=900), sampler=sampler(rank), number=i)
                for i in (1, 2)
            )
            for rank in range(2)
        ],
        "skipped",
    ),
    "two loaders in turn, of other data": (
        [
            tuple(
                replace(one, dataset_digest=str(one.number)) for one in remade(rank)
            )
            for rank in range(2)
        ],
        "skipped",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_needs_no_epoch_is_no_alarm(name):
    loaders, expected = HEALTHY[name]
    assert outcome(unset_epochs(replicas(*loaders))) == expected
