"""Samplers whose epoch is never set, and those that need not."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.files import plan_report
from ddpdoctor.model.data import EpochCall, SamplingPlan, Sharing
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.stacks import Frame
from tests.rules.build import asking
from tests.rules.data.seen import LINE, broken_off, digests_of, drawn, loader, order, outcome, replicas, sampler, share

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
    "set, and without effect on the order": ([used(rank, (0, 0), (0, 1)) for rank in range(2)], "passed"),
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


# Ranks that run out of batches, and those that are meant to have fewer.


uneven = asking("DD704")


def used_up(*batches, under_way=False, **more):
    """A loader with passes of so many batches; the last one may be under way."""
    epochs = [drawn(list(range(8 * count)), i) for i, count in enumerate(batches, 1)]
    if under_way:
        epochs[-1] = replace(epochs[-1], complete=False, ended_ns=None)
    return loader(*epochs, samples=None, **more)


UNEVEN = {
    "one pass": ([used_up(12), used_up(10), used_up(12)], (1,)),
    "waits in backward": ([used_up(11, under_way=True), used_up(10)], (1,)),
    "is one epoch ahead": ([used_up(12, 12, under_way=True), used_up(10, 10)], (1,)),
    "all shorter than one": ([used_up(12), used_up(10), used_up(11)], (1, 2)),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_that_ran_out_are_found(name):
    loaders, blamed = UNEVEN[name]
    (finding,) = uneven(replicas(*loaders, ended_badly=True)).findings
    assert (finding.code, finding.kind, finding.ranks) == ("DD704", "uneven-batches", blamed)
    assert finding.severity is Severity.ERROR
    assert [(place.rank, place.line) for place in finding.where] == [(rank, LINE) for rank in blamed]


def test_a_job_that_finished_is_warned_with_the_numbers():
    (finding,) = uneven(replicas(used_up(12), used_up(10), used_up(12))).findings
    assert finding.severity is Severity.WARNING
    assert finding.summary == "rank 1 has 10 batches in pass 1, but ranks 0 and 2 have 12: the DataLoader (train.py:12)"
    assert "batches of pass 1: 12 on ranks 0 and 2, 10 on rank 1" in finding.evidence


NOT_UNEVEN = {
    "even": ([used_up(12, 12), used_up(12, 12)], "passed"),
    "inside join": ([used_up(12, in_join=True), used_up(10, in_join=True)], "skipped"),
    "broken off": ([used_up(12), replace(used_up(12), epochs=(broken_off(used_up(12).epochs[0], 10),))], "skipped"),
    "begun anew until all had as many": ([used_up(12, 8, under_way=True), used_up(10, 10)], "passed"),
    "begun anew, and ended elsewhere": ([used_up(12, 9, under_way=True), used_up(10, 10, 1, under_way=True)], "passed"),
    "the next pass began on one rank first": ([used_up(12, 1, under_way=True), used_up(12)], "passed"),
    "more batches that were not trained on": (
        [loader(drawn(list(range(96)), backwards=10), trained_batches=10), used_up(10)],
        "passed",
    ),
    "evaluation": ([loader(drawn(list(range(8 * n)), trained=False, backwards=0)) for n in (9, 12)], "skipped"),
}


@pytest.mark.parametrize("name", NOT_UNEVEN)
def test_other_numbers_of_batches_are_no_alarm(name):
    loaders, expected = NOT_UNEVEN[name]
    assert outcome(uneven(replicas(*loaders, ended_badly=True))) == expected


# Ranks that train on the same samples, and the many that only seem to.


duplicates = asking("DD701")

ALL = list(range(96))
MIXED = (order(96, 1), order(96, 2))
ITERABLE = {"iterable": True, "indices_seen": False, "samples": None}


def undrawn(*digests, batches=6):
    """A pass over an iterable dataset, of which only batches were seen."""
    nothing = {"drawn": 0, "total": 0, "order": "", "first": "", "batches": batches, "backwards": batches}
    return drawn([], sample_digests=(), batch_digests=digests, **nothing)


FAULTS_DUPLICATES = {
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


@pytest.mark.parametrize("name", FAULTS_DUPLICATES)
def test_ranks_with_the_same_samples_are_found(name):
    (finding,) = duplicates(replicas(*FAULTS_DUPLICATES[name])).findings
    assert (finding.code, finding.kind, finding.ranks) == ("DD701", "duplicate-data", (0, 1))
    assert (finding.severity, finding.confidence) == (Severity.ERROR, Confidence.HIGH)
    assert [(place.rank, place.line) for place in finding.where] == [(0, LINE), (1, LINE)]
    assert finding.fix


CAUSES = {
    "no sampler": "has no distributed sampler",
    "a sampler for one rank": "has a sampler for a single rank (num_replicas=1)",
    "the same shard": "has a sampler with rank=0 on each rank",
    "two of three have one rank": "has several samplers with the same rank",
    "only the second pass": "has a DistributedSampler that gives each rank the same samples",
    "an iterable dataset": "has an iterable dataset that gives each rank the same batches",
}
OF_THREE = [loader(drawn(share(96, 3, 0)), sampler=sampler(rank, 3)) for rank in (0, 0, 1)]


@pytest.mark.parametrize("name", CAUSES)
def test_why_the_samples_are_the_same_is_said(name):
    seen = FAULTS_DUPLICATES.get(name, OF_THREE)
    (finding,) = duplicates(replicas(*seen, size=len(seen))).findings
    assert CAUSES[name] in finding.summary


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
    (finding,) = duplicates(replicas(*FAULTS_DUPLICATES["no sampler"])).findings
    assert "the same 96 samples" in finding.summary
    assert any("96 indices in 12 batches (sum 4560, xor 0)" in line for line in finding.evidence)
    assert any("48 of 96 samples (6 batches of 8)" in line for line in finding.evidence)


def test_descriptions_alone_make_it_less_sure():
    bare = drawn(ALL, sample_digests=(), batch_digests=())
    (finding,) = duplicates(replicas(loader(bare), loader(bare))).findings
    assert finding.confidence is Confidence.MEDIUM


OWN = [loader(drawn(ALL, content=str(rank)), dataset_digest=str(rank)) for rank in range(2)]
HEALTHY_DUPLICATES = {
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
    "not trained": ([loader(drawn(ALL, trained=False, backwards=0)) for _ in range(2)], "skipped"),
    "an evaluation that was left before a backward": (
        [loader(replace(broken_off(drawn(ALL)), backwards=1)) for _ in range(2)],
        "skipped",
    ),
    "the script shares out batches": ([loader(drawn(ALL, split_after=True)) for _ in range(2)], "skipped"),
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
    "other lines": ([loader(drawn(ALL)), replace(loader(drawn(ALL)), site=replace(OWN[0].site, line=99))], "skipped"),
}


@pytest.mark.parametrize("name", HEALTHY_DUPLICATES)
def test_what_only_looks_alike_is_no_alarm(name):
    loaders, expected = HEALTHY_DUPLICATES[name]
    assert outcome(duplicates(replicas(*loaders))) == expected


def test_a_loader_that_somebody_named_needs_no_training():
    untrained = loader(drawn(ALL, trained=False, backwards=0))
    assert outcome(duplicates(replicas(untrained, untrained, trained_only=False))) == (0, 1)


# What the arithmetic of an epoch means: tables of plans in, findings out.


E, W, N = Severity.ERROR, Severity.WARNING, Severity.INFO


def judged(samples, world_size, batch_size, **more):
    return plan_report(
        SamplingPlan(samples=samples, world_size=world_size, batch_size=batch_size, **more), ("ddpdoctor",)
    )


@pytest.mark.parametrize(
    ("numbers", "more", "expected"),
    [
        ((64, 2, 8), {}, []),
        ((65, 2, 8), {"drop_last": True}, []),
        ((455, 2, 8), {}, [("DD705", N)]),
        ((66, 2, 8), {}, [("DD705", W)]),
        ((66, 2, 1), {}, []),
        ((10, 2, 8), {"drop_last": True}, [("DD705", E)]),
        ((65, 2, 8), {"sharing": Sharing.SPLIT}, [("DD704", E), ("DD705", W)]),
        ((66, 2, 4), {"sharing": Sharing.SPLIT, "drop_last": True}, []),
        ((64, 2, 8), {"sharing": Sharing.NONE}, [("DD701", E)]),
        ((64, 1, 8), {"sharing": Sharing.NONE}, []),
        ((70, 2, 8), {"drop_last": True, "shuffle": False}, [("DD703", N)]),
        ((64, 2, 8), {"accumulation": 3}, [("DD706", N)]),
        ((64, 2, 8), {"accumulation": 4}, []),
    ],
)
def test_a_plan_has_its_findings(numbers, more, expected):
    report = judged(*numbers, **more)
    assert [(finding.code, finding.severity) for finding in report.findings] == expected


def test_who_ends_early_is_named():
    (finding, *_) = judged(9, 4, 2, sharing=Sharing.SPLIT).findings
    assert finding.ranks == (1, 2, 3)
    assert finding.summary.startswith("rank 0 has 2 batches, but ranks 1-3 have 1:")


def test_every_check_says_what_it_saw():
    checks = judged(455, 2, 8, accumulation=4).checks
    assert [check.code for check in checks] == ["DD701", "DD703", "DD704", "DD705", "DD706"]
    assert all(check.seen for check in checks)
    assert checks[-1].seen == "29 batches are 7 steps of 4 batches, 1 batch is left"
    assert checks[-1].outcome is Outcome.PASSED  # what it found is a note
