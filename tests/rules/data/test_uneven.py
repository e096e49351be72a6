"""Ranks that run out of batches, and those that are meant to have fewer."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Severity
from tests.rules.asking import asking

from .seen import LINE, broken_off, drawn, loader, outcome, replicas

uneven = asking("DD704")


def used(*batches, under_way=False, **more):
    """A loader with passes of so many batches; the last one may be under way."""
    epochs = [drawn(list(range(8 * count)), i) for i, count in enumerate(batches, 1)]
    if under_way:
        epochs[-1] = replace(epochs[-1], complete=False, ended_ns=None)
    return loader(*epochs, samples=None, **more)


FAULTS = {
    "one pass": ([used(12), used(10), used(12)], (1,)),
    "waits in backward": ([used(11, under_way=True), used(10)], (1,)),
    "is one epoch ahead": ([used(12, 12, under_way=True), used(10, 10)], (1,)),
    "all shorter than one": ([used(12), used(10), used(11)], (1, 2)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_ranks_that_ran_out_are_found(name):
    loaders, blamed = FAULTS[name]
    (finding,) = uneven(replicas(*loaders, ended_badly=True)).findings
    assert (finding.code, finding.kind, finding.ranks) == ("DD704", "uneven-batches", blamed)
    assert finding.severity is Severity.ERROR
    assert [(place.rank, place.line) for place in finding.where] == [(rank, LINE) for rank in blamed]


def test_a_job_that_finished_is_warned_with_the_numbers():
    (finding,) = uneven(replicas(used(12), used(10), used(12))).findings
    assert finding.severity is Severity.WARNING
    assert finding.summary == "rank 1 has 10 batches in pass 1, but ranks 0 and 2 have 12: the DataLoader (train.py:12)"
    assert "batches of pass 1: 12 on ranks 0 and 2, 10 on rank 1" in finding.evidence


HEALTHY = {
    "even": ([used(12, 12), used(12, 12)], "passed"),
    "inside join": ([used(12, in_join=True), used(10, in_join=True)], "skipped"),
    "broken off": ([used(12), replace(used(12), epochs=(broken_off(used(12).epochs[0], 10),))], "skipped"),
    "begun anew until all had as many": ([used(12, 8, under_way=True), used(10, 10)], "passed"),
    "begun anew, and ended elsewhere": ([used(12, 9, under_way=True), used(10, 10, 1, under_way=True)], "passed"),
    "the next pass began on one rank first": ([used(12, 1, under_way=True), used(12)], "passed"),
    "more batches that were not trained on": (
        [loader(drawn(list(range(96)), backwards=10), trained_batches=10), used(10)],
        "passed",
    ),
    "evaluation": ([loader(drawn(list(range(8 * n)), trained=False, backwards=0)) for n in (9, 12)], "skipped"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_other_numbers_of_batches_are_no_alarm(name):
    loaders, expected = HEALTHY[name]
    assert outcome(uneven(replicas(*loaders, ended_badly=True))) == expected
