"""DD402, DD403 and DD404: who is named where a rank, a link or a node is slow, and where nobody can be."""

from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import Collective, Reason, Wrong
from ddpdoctor.model.findings import Confidence, Outcome
from ddpdoctor.rules.bandwidth.curves import Measured
from ddpdoctor.rules.bandwidth.localize import check_slow_link, check_slow_node, check_slow_rank
from ddpdoctor.rules.bandwidth.verdicts import check_wrong_data
from tests.rules.bandwidth.build import MIB, NARROW, TURNS, arrival, bench, nodes, pairs, row, scene, sweep, with_end

RULES = {"rank": check_slow_rank, "link": check_slow_link, "node": check_slow_node}
ONE = ("a",) * 3
EIGHT = ("a",) * 8
THREE = ("a", "b", "c")
TWO_EACH = ("a", "a", "b", "b", "c", "c")
FOUR_EACH = ("a",) * 4 + ("b",) * 4
WIRED = {
    (one, other): 0.25 for one in range(8) for other in range(one + 1, 8) if (one % 4, other % 4) in {(0, 2), (1, 3)}
}
"""Of eight GPUs, six pairs without NVLink."""


def who(asked):
    """Return who is named by which rule: ranks, and hosts for a node."""
    answers = {name: rule(asked) for name, rule in RULES.items()}
    return {
        name: [problem.hosts if name == "node" else problem.ranks for problem in answer.problems]
        for name, answer in answers.items()
        if answer.problems
    }


@pytest.mark.parametrize(
    "asked",
    [
        scene(ONE, pairs=pairs(ONE)),
        scene(EIGHT, pairs=pairs(EIGHT)),
        scene(THREE, pairs=pairs(THREE), nodes=nodes(THREE)),
        scene(TWO_EACH, pairs=pairs(TWO_EACH), nodes=nodes(TWO_EACH)),
        # Nearly twice as slow is not twice as slow.
        scene(ONE, pairs=pairs(ONE, with_end(2, 3, 0.7))),
        # The load of others comes and goes.
        scene(ONE, pairs=pairs(ONE, latency=with_end(2, 3, 9.0), turns=range(5))),
        scene(ONE, pairs=pairs(ONE, {(0, 2): NARROW}, turns=range(6))),
        scene(TWO_EACH, nodes=nodes(TWO_EACH, {("b", None): 0.3}, turns=range(7))),
        # Everybody is slow: nobody is.
        scene(ONE, pairs=pairs(ONE, dict.fromkeys(((0, 1), (0, 2), (1, 2)), NARROW))),
        # A thread that wakes late for one other rank says nothing of their link.
        scene(ONE, pairs=pairs(ONE, latency={(0, 2): 9.0})),
        # So the machine is wired.
        scene(EIGHT, pairs=pairs(EIGHT, WIRED)),
        # Pairs between machines are slower than those within.
        scene(FOUR_EACH, pairs=pairs(FOUR_EACH, {(one, other): 0.1 for one in range(4) for other in range(4, 8)})),
        scene(("a",) * 2, arrivals=(arrival(0, -300.0, 0.2), arrival(1, 300.0, 0.8))),
        scene(ONE, arrivals=(arrival(0, 0.0, 0.3), arrival(1, 2500.0, 0.5), arrival(2, 0.0, 0.2))),
        scene(ONE, arrivals=(arrival(0, -9e3, 0.0, 10), arrival(1, 2e4, 1.0, 10), arrival(2, -9e3, 0.0, 10))),
    ],
)
def test_nobody_is_slow(asked):
    assert who(asked) == {}
    assert {rule(asked).outcome for rule in RULES.values()} <= {Outcome.PASSED, Outcome.SKIPPED}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (scene(ONE, pairs=pairs(ONE, with_end(2, 3, NARROW))), {"rank": [(2,)]}),
        (scene(ONE, pairs=pairs(ONE, latency=with_end(0, 3, 5.0))), {"rank": [(0,)]}),
        (scene(ONE, pairs=pairs(ONE, latency=with_end(0, 3, 5.0), turns=range(6))), {"rank": [(0,)]}),
        (scene(ONE, pairs=pairs(ONE, {(0, 2): NARROW})), {"link": [(0, 2)]}),
        (scene(ONE, pairs=pairs(ONE, {(0, 2): NARROW}, turns=range(8))), {"link": [(0, 2)]}),
        (scene(EIGHT, pairs=pairs(EIGHT, with_end(5, 8, 0.3))), {"rank": [(5,)]}),
        # Two slow ranks, and a slow link between two others.
        (
            scene(EIGHT, pairs=pairs(EIGHT, {**with_end(5, 8, 0.2), **with_end(6, 8, 0.1), (0, 3): 0.3})),
            {"rank": [(6,), (5,)], "link": [(0, 3)]},
        ),
        (scene(EIGHT, pairs=pairs(EIGHT, {(0, 3): 0.3, (1, 2): 0.2})), {"link": [(1, 2), (0, 3)]}),
        # A slow rank is one within its machine, or between machines; it is named once.
        (scene(FOUR_EACH, pairs=pairs(FOUR_EACH, with_end(5, 8, 0.2))), {"rank": [(5,)]}),
        # A rank alone on its host, with pairs only, and with nodes.
        (scene(THREE, pairs=pairs(THREE, with_end(2, 3, NARROW))), {"rank": [(2,)]}),
        (
            scene(
                THREE,
                pairs=pairs(THREE, with_end(2, 3, NARROW)),
                nodes=nodes(THREE, {("a", "c"): NARROW, ("b", "c"): NARROW}),
            ),
            {"node": [("c",)]},
        ),
        (scene(THREE, nodes=nodes(THREE, {("a", "c"): NARROW, ("b", "c"): NARROW})), {"node": [("c",)]}),
        (scene(THREE, nodes=nodes(THREE, {("a", "c"): NARROW})), {"link": [(0, 2)]}),
        (
            scene(THREE, pairs=pairs(THREE, {(0, 2): NARROW}), nodes=nodes(THREE, {("a", "c"): NARROW})),
            {"link": [(0, 2)]},
        ),
        (scene(TWO_EACH, nodes=nodes(TWO_EACH, {("b", None): 0.3})), {"node": [("b",)]}),
        # All ranks of a host are slow with other hosts and not with each other.
        (
            scene(TWO_EACH, pairs=pairs(TWO_EACH, {**with_end(2, 6, NARROW), **with_end(3, 6, NARROW), (2, 3): 1.0})),
            {"node": [("b",)]},
        ),
        # The way between two of three hosts.
        (
            scene(TWO_EACH, pairs=pairs(TWO_EACH, {(one, other): NARROW for one in (0, 1) for other in (4, 5)})),
            {"link": [(0, 1, 4, 5)]},
        ),
        # A slow rank makes its node slow, inside and with others, and is named alone.
        (
            scene(
                FOUR_EACH[:3] + FOUR_EACH[4:7] + ("c",) * 3,
                pairs=pairs(FOUR_EACH[:3] + FOUR_EACH[4:7] + ("c",) * 3, with_end(4, 9, 0.2)),
                nodes=nodes(
                    FOUR_EACH[:3] + FOUR_EACH[4:7] + ("c",) * 3, {("b", None): 0.2, ("a", "b"): 0.2, ("b", "c"): 0.2}
                ),
            ),
            {"rank": [(4,)]},
        ),
    ],
)
def test_who_is_slow(asked, named):
    assert who(asked) == named


@pytest.mark.parametrize(
    ("asked", "rule", "why"),
    [
        (scene(("a", "a"), pairs=pairs(("a", "a"))), check_slow_rank, "three ranks are needed"),
        (scene(("a", "a"), pairs=pairs(("a", "a"))), check_slow_link, "three ranks are needed"),
        (scene(("a", "b"), nodes=nodes(("a", "b"))), check_slow_node, "three nodes are needed"),
        (scene(ONE, nodes=()), check_slow_node, "there is one"),
        (scene(ONE, pairs=()), check_slow_link, "no pair was measured"),
        (scene(("a", "b", "b"), pairs=pairs(("a", "b", "b"))), check_slow_rank, "too few pairs between hosts"),
        (
            scene(ONE, pairs=tuple(replace(pair, busbws_gb_s=(1.0, 1.0)) for pair in pairs(ONE))),
            check_slow_rank,
            "too few rounds",
        ),
    ],
)
def test_what_was_asked_for_and_cannot_be_determined(asked, rule, why):
    answer = rule(asked)

    assert answer.outcome is Outcome.INCONCLUSIVE
    assert why in answer.seen


def test_what_was_not_asked_for():
    assert {rule(scene(ONE)).outcome for rule in RULES.values()} == {Outcome.SKIPPED}


def test_a_rank_with_a_narrow_way():
    (problem,) = check_slow_rank(scene(ONE, pairs=pairs(ONE, with_end(2, 3, NARROW)))).problems

    assert problem.summary.startswith("rank 2 on a is slow with every other rank: 0.01")
    assert problem.hosts == ("a",)
    assert problem.confidence is Confidence.HIGH
    assert f"at least twice as slow in {TURNS} of {TURNS} rounds" in problem.evidence[0]
    assert "the bandwidth is low" in problem.evidence[1]
    assert len(problem.evidence) == 2


def test_a_rank_that_is_slow_to_answer_with_what_its_machine_shows():
    own = Reason(text="others kept CPU 1 busy", source="/proc/stat", ranks=(2,))
    everybody = Reason(text="others kept CPUs busy", source="/proc/stat", ranks=(0, 1, 2))
    machine = Reason(text="all ranks are on one host", source="the host name's address", hosts=("a",))
    measured = pairs(ONE, latency=with_end(2, 3, 6.0), alone=False)
    (problem,) = check_slow_rank(scene(ONE, pairs=measured, reasons=(own, everybody, machine))).problems

    assert "ms for a small message instead of" in problem.summary
    assert "check its CPU core" in problem.evidence[1]
    assert problem.evidence[2:] == (
        "others kept CPU 1 busy (/proc/stat)",
        "several ran at once, so they may have slowed each other",
    )
    assert problem.confidence is Confidence.MEDIUM


def test_a_late_rank_is_named_and_the_others_are_not():
    arrivals = (arrival(0, -10e3, 0.0), arrival(1, 20e3, 0.99), arrival(2, -9.8e3, 0.01))
    (problem,) = check_slow_rank(scene(ONE, arrivals=arrivals)).problems

    assert problem.ranks == (1,)
    assert problem.summary == ("rank 1 on a is 20 ms late to each call, and the others wait for it")
    assert "last in 99%" in problem.evidence[0]


def test_a_rank_that_hands_in_late_is_late_and_not_slow():
    arrivals = (arrival(0, -10e3, 0.0), arrival(1, 20e3, 0.99), arrival(2, -9.8e3, 0.01))
    measured = pairs(ONE, latency=with_end(1, 3, 50.0))
    (problem,) = check_slow_rank(scene(ONE, arrivals=arrivals, pairs=measured)).problems

    assert "late to each call" in problem.summary


def test_pairs_that_are_slower_by_the_wiring_are_said():
    answer = check_slow_link(scene(EIGHT, pairs=pairs(EIGHT, WIRED)))

    assert answer.outcome is Outcome.PASSED
    assert "6 of them are slower than others" in answer.seen


def test_ranks_that_share_a_gpu_wait_for_each_other_and_none_is_named():
    arrivals = (arrival(0, -10e3, 0.0), arrival(1, 20e3, 0.99), arrival(2, -9.8e3, 0.01))
    asked = scene(ONE, pairs=pairs(ONE, with_end(2, 3, NARROW)), arrivals=arrivals)
    sharing = tuple(replace(member, gpu_ranks=3) for member in asked.bench.members)
    shared = replace(asked, bench=replace(asked.bench, members=sharing))

    assert who(asked)
    assert not who(shared)
    assert "share a GPU" in check_slow_rank(shared).seen


# DD401: wrong data, and whom it blames.


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
