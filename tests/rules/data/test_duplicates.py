"""Ranks that train on the same samples, and the many that only seem to."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Confidence, Severity
from tests.rules.asking import asking
from tests.rules.data.seen import LINE, broken_off, digests_of, drawn, loader, order, outcome, replicas, sampler, share

duplicates = asking("DD701")

ALL = list(range(96))
MIXED = (order(96, 1), order(96, 2))
ITERABLE = {"iterable": True, "indices_seen": False, "samples": None}


def undrawn(*digests, batches=6):
    """A pass over an iterable dataset, of which only batches were seen."""
    nothing = {"drawn": 0, "total": 0, "order": "", "first": "", "batches": batches, "backwards": batches}
    return drawn([], sample_digests=(), batch_digests=digests, **nothing)


FAULTS = {
    "no sampler": [loader(drawn(ALL)), loader(drawn(ALL))],
    "no sampler, other orders": [loader(drawn(MIXED[0])), loader(drawn(MIXED[1]))],
    "no sampler, the last batch dropped": [
        loader(drawn(indices[:90]), samples=91, drop_last=True) for indices in (order(91, 1), order(91, 2))
    ],
    "a sampler for one rank": [loader(drawn(ALL), sampler=sampler(0, 1)) for _ in range(2)],
    "the same shard": [loader(drawn(share(96, 2, 0)), sampler=sampler(0)) for _ in range(2)],
    "broken off": [loader(broken_off(drawn(ALL))), loader(broken_off(drawn(ALL)))],
    "one was ahead": [
        loader(replace(broken_off(drawn(ALL), batches), drawn=8 * batches, order=str(batches))) for batches in (4, 5)
    ],
    "weights and one seed": [loader(drawn([5, 5, 9, 40, 60, 61, 62, 80, 81])) for _ in range(2)],
    "augmented, with labels": [
        loader(drawn(ALL, sample_digests=(*digests_of([0, 20, 40, 60, 80], "a", 1), *labels), batch_digests=()))
        for labels in [[f"{i}:1:{i % 3}" for i in (0, 20, 40, 60, 80)]]
        for _ in range(2)
    ],
    "an iterable dataset": [loader(undrawn("0:a", "1:b", "0:c", "1:d"), **ITERABLE) for _ in range(2)],
    "only the second pass": [
        loader(drawn(share(96, 2, rank)), drawn(share(96, 2, 0, 5), 2), sampler=sampler(rank)) for rank in range(2)
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_ranks_with_the_same_samples_are_found(name):
    (finding,) = duplicates(replicas(*FAULTS[name])).findings
    assert (finding.code, finding.kind, finding.ranks) == ("DD701", "duplicate-data", (0, 1))
    assert (finding.severity, finding.confidence) == (Severity.ERROR, Confidence.HIGH)
    assert [(place.rank, place.line) for place in finding.where] == [(0, LINE), (1, LINE)]
    assert finding.fix


PLAIN = "torch.utils.data.sampler."
FIXES = {
    "shuffled": (
        {"sampler": sampler(type=f"{PLAIN}RandomSampler", replicas=None, rank=None)},
        "replace shuffle=True with sampler=DistributedSampler",
    ),
    "in order": (
        {"sampler": sampler(type=f"{PLAIN}SequentialSampler", replicas=None, rank=None)},
        "give the DataLoader sampler=DistributedSampler",
    ),
    "torch's, with one rank's number": (
        {"sampler": sampler(0, 1)},
        "create DistributedSampler(dataset) after init_process_group without num_replicas and rank",
    ),
    "weights": (
        {"sampler": sampler(type=f"{PLAIN}WeightedRandomSampler", replicas=None, rank=None, standard=False)},
        "make WeightedRandomSampler draw other samples on each rank",
    ),
    "a stream": (ITERABLE, "itertools.islice"),
}


@pytest.mark.parametrize("name", FIXES)
def test_the_fix_fits_the_sampler_that_is_there(name):
    fields, fix = FIXES[name]
    drew = undrawn("0:a", "1:b", "0:c", "1:d") if fields is ITERABLE else drawn(ALL)
    (finding,) = duplicates(replicas(*[loader(drew, **fields) for _ in range(2)])).findings
    assert fix in finding.fix
    assert ("shuffle=True" in finding.fix) == (name == "shuffled")


def test_of_many_ranks_those_with_the_same_share_are_named():
    found = duplicates(
        replicas(*[loader(drawn(share(96, 4, rank % 2)), sampler=sampler(rank % 2, 4)) for rank in range(3)], size=3)
    )
    (finding,) = found.findings
    assert finding.ranks == (0, 2)
    assert "no rank draws 2 of the 4 shares that the samplers make" in finding.evidence


def test_the_arithmetic_is_said():
    (finding,) = duplicates(replicas(*FAULTS["no sampler"])).findings
    assert "the same 96 samples" in finding.summary
    assert any("96 indices in 12 batches (sum 4560, xor 0)" in line for line in finding.evidence)
    assert any("48 of 96 samples (6 batches of 8)" in line for line in finding.evidence)


def test_descriptions_alone_make_it_less_sure():
    bare = drawn(ALL, sample_digests=(), batch_digests=())
    (finding,) = duplicates(replicas(loader(bare), loader(bare))).findings
    assert finding.confidence is Confidence.MEDIUM


OWN = [loader(drawn(ALL, content=str(rank)), dataset_digest=str(rank)) for rank in range(2)]
HEALTHY = {
    "shares": ([loader(drawn(share(96, 2, rank)), sampler=sampler(rank)) for rank in range(2)], "passed"),
    "data of its own on each rank": (OWN, "passed"),
    "own data that is described alike": ([replace(one, dataset_digest="d") for one in OWN], "skipped"),
    "augmented, without labels": (
        [loader(drawn(ALL, content=str(rank), batch_digests=())) for rank in range(2)],
        "skipped",
    ),
    "nothing is known of contents": (
        [loader(drawn(ALL, sample_digests=(), batch_digests=()), dataset_digest="") for _ in range(2)],
        "skipped",
    ),
    "not trained": (
        [loader(drawn(ALL, trained=False, backwards=0)) for _ in range(2)],
        "skipped",
    ),
    "an evaluation that was left before a backward": (
        [loader(replace(broken_off(drawn(ALL)), backwards=1)) for _ in range(2)],
        "skipped",
    ),
    "the script shares out batches": (
        [loader(drawn(ALL, split_after=True)) for _ in range(2)],
        "skipped",
    ),
    "fewer samples than ranks": ([loader(drawn([0]), samples=1) for _ in range(2)], "skipped"),
    "an iterable dataset, split": (
        [loader(undrawn(f"0:a{rank}", f"0:c{rank}"), **ITERABLE) for rank in range(2)],
        "passed",
    ),
    "an iterable dataset, augmented": (
        [loader(undrawn(f"0:a{rank}", "1:b", f"0:c{rank}", "1:d"), **ITERABLE) for rank in range(2)],
        "passed",
    ),
    "an iterable dataset that says the same all the time": (
        [loader(undrawn("0:a", "0:a"), **ITERABLE) for _ in range(2)],
        "passed",
    ),
    "with replacement, own seeds": (
        [loader(drawn([3 + rank, 3 + rank, *range(rank, 90)])) for rank in range(2)],
        "passed",
    ),
    "on one rank only": ([loader(drawn(ALL)), ()], "skipped"),
    "other lines": (
        [loader(drawn(ALL)), replace(loader(drawn(ALL)), site=replace(OWN[0].site, line=99))],
        "skipped",
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_only_looks_alike_is_no_alarm(name):
    loaders, expected = HEALTHY[name]
    assert outcome(duplicates(replicas(*loaders))) == expected


def test_a_loader_that_somebody_named_needs_no_training():
    untrained = loader(drawn(ALL, trained=False, backwards=0))
    assert outcome(duplicates(replicas(untrained, untrained, trained_only=False))) == (0, 1)
