"""DD401: wrong data, and whom it blames."""

import pytest

from ddpdoctor.model.bandwidth import Collective, Wrong
from ddpdoctor.model.findings import Confidence, Outcome
from ddpdoctor.rules.bandwidth.curve import Measured
from ddpdoctor.rules.bandwidth.wrong import check_wrong_data
from tests.rules.bandwidth.sweeps import MIB, bench, row, sweep

HIGH, MEDIUM, LOW = Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW
ALL = (0, 1, 2, 3)
GATHER, BROADCAST, REDUCE = Collective.ALL_GATHER, Collective.BROADCAST, Collective.REDUCE
TO_ALL, SEND_RECV = Collective.ALL_TO_ALL, Collective.SEND_RECV


def wrong(rank, *, collective=Collective.ALL_REDUCE, index=17, found=3.0, size=MIB, count=1, **changes):
    redop = "sum" if collective.reduces else None
    given = {"dtype": "float32", "in_place": False, "expected": 6.0, **changes}
    return Wrong(
        rank=rank, host=f"node{rank // 2}", collective=collective, redop=redop, size_bytes=size, index=index,
        found=found, count=count, **given,
    )  # fmt: skip


def ask(*wrongs, rows=None, ranks=4, hosts=2):
    rows = sweep({MIB: 1.0}, ranks=ranks) if rows is None else rows
    return check_wrong_data(Measured(bench=bench(rows, ranks=ranks, hosts=hosts, wrong=tuple(wrongs))))


def test_right_data():
    answer = ask(rows=sweep({MIB: 1.0, 2 * MIB: 1.0}))

    assert (answer.outcome, answer.problems) == (Outcome.PASSED, ())
    assert answer.seen == "the results of 2 measured cases are correct"


@pytest.mark.parametrize("rows", [(), sweep({MIB: 1.0}, wrong=None)])
def test_nothing_checked(rows):
    assert ask(rows=rows).outcome is Outcome.SKIPPED


def test_one_element_of_one_rank():
    answer = ask(wrong(2))

    assert answer.outcome is Outcome.FAILED
    (problem,) = answer.problems
    assert problem.summary == "Wrong data: all_reduce float32 of 1 MiB on rank 2: element 17 is 3 instead of 6."
    assert (problem.ranks, problem.hosts, problem.confidence) == ((2,), ("node1",), HIGH)
    assert "the same call gave ranks 0, 1, 3 the correct result" in problem.evidence
    assert "check-env" in problem.fix


@pytest.mark.parametrize(
    ("wrongs", "ranks", "confidence", "why"),
    [
        ([wrong(1), wrong(3)], (1, 3), HIGH, "the same call gave ranks 0 and 2 the correct result"),
        ([wrong(n) for n in (0, 1, 2)], (0, 1, 2), HIGH, "the same call gave rank 3 the correct result"),
        ([wrong(n) for n in ALL], ALL, LOW, "all ranks have the same wrong number, so one of them sent it"),
        ([wrong(n, found=float(n)) for n in ALL], ALL, LOW, "no rank has the correct result"),
        ([wrong(n, index=n) for n in ALL], ALL, LOW, "no rank has the correct result"),
        ([wrong(1, collective=GATHER)], (1,), HIGH, "the same call gave"),
        # The root alone has the result.
        ([wrong(0, collective=REDUCE)], ALL, LOW, "all ranks sent data"),
        ([wrong(2, collective=BROADCAST)], (2,), MEDIUM, "ranks 1 and 3 received the same data correctly"),
        ([wrong(n, collective=BROADCAST) for n in (1, 2, 3)], (0,), MEDIUM, "received data from rank 0 has wrong data"),
        # Of the rank before, or made wrong on arrival.
        ([wrong(2, collective=SEND_RECV)], (1, 2), LOW, "sender and receiver cannot be distinguished"),
        ([wrong(0, collective=SEND_RECV)], (0, 3), LOW, "sender and receiver"),
        ([wrong(n, collective=SEND_RECV) for n in (1, 2)], (1,), MEDIUM, "it sent or received every wrong message"),
        # Of 262144 elements, those from 131072 on come of rank 2.
        ([wrong(0, collective=TO_ALL, index=140_000)], (0, 2), LOW, "sender and receiver"),
        ([wrong(n, collective=TO_ALL, index=140_000) for n in (0, 1, 3)], (2,), MEDIUM, "every wrong message"),
        ([wrong(0, collective=TO_ALL, index=140_000, size=2 * MIB)], (0,), LOW, "sender and receiver"),
    ],
)
def test_who_is_to_blame(wrongs, ranks, confidence, why):
    (problem,) = ask(*wrongs).problems

    assert (problem.ranks, problem.confidence) == (ranks, confidence)
    assert any(why in line for line in problem.evidence)


def test_of_two_ranks_the_one_with_the_wrong_sum_is_to_blame_and_a_broadcast_blames_both():
    (summed,) = ask(wrong(1), ranks=2, hosts=1).problems
    (sent,) = ask(wrong(1, collective=BROADCAST), ranks=2, hosts=1).problems

    assert (summed.ranks, summed.confidence) == ((1,), HIGH)
    assert (sent.ranks, sent.confidence) == ((0, 1), LOW)


def test_one_fault_seen_in_many_cases_is_one_finding():
    wrongs = [wrong(1, size=MIB << power, count=5) for power in reversed(range(12))]

    (problem,) = ask(*wrongs).problems

    assert problem.summary == (
        "Wrong data: all_reduce float32 of 1 MiB on rank 1: element 17 is 3 instead of 6 (5 elements are wrong), "
        "and 11 more wrong results."
    )
    assert problem.evidence[8] == "4 more"
    assert len(problem.evidence) == 10


def test_faults_of_different_ranks_are_different_findings():
    answer = ask(wrong(1), wrong(2, size=2 * MIB), rows=[row(MIB, 1.0), row(2 * MIB, 1.0)])

    assert [problem.ranks for problem in answer.problems] == [(1,), (2,)]


def test_values_are_exact():
    (problem,) = ask(wrong(1, found=0.1, expected=16777217.0, in_place=True)).problems

    assert "all_reduce float32 of 1 MiB on rank 1" in problem.summary
    assert "is 0.10000000000000001 instead of 16777217" in problem.summary
