"""What `check-rendezvous` says of what nodes saw of each other."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.rendezvous import judge_meeting
from ddpdoctor.model.findings import Judgment
from ddpdoctor.model.reaching import Contact
from ddpdoctor.rules.rendezvous.mesh import PairSide, explain, say_duration
from tests.golden import table
from tests.rules.rendezvous import build
from tests.rules.rendezvous.build import (
    LARGE,
    absent,
    attempt,
    column,
    healthy,
    pair,
    row,
    transfer,
    view,
    visit,
)

TWO = healthy(2)
FOUR = healthy()


def fails(contact):
    return lambda source, target: pair(source, target, contact)


def large(**more):
    return lambda source, target: pair(source, target, large=transfer(LARGE, **more))


STALLS = large(contact=Contact.NO_ANSWER, sent=18, retransmitted=8, delivered=0)
LOSES = large(duration_s=1.2, sent=3600, retransmitted=720)
STALLS_BY_LOSS = large(contact=Contact.NO_ANSWER, sent=900, retransmitted=190)
CRAWLS = large(duration_s=0.35)


def lone(contact):
    """Return what node 1 of 2 saw alone."""
    return replace(
        TWO, visits=(absent(0), visit(1, store_view=view(1, contact))), complete=False, pairs=(), trials=(),
        fleet=replace(TWO.fleet, nodes=TWO.fleet.nodes[1:]),
    )  # fmt: skip


def two_addresses(number, first, second):
    """Return what a node saw of a store whose name has two addresses."""
    return replace(view(number), attempts=(attempt(first, 77), attempt(second)))


def meet(facts, *found):
    """Judge a rendezvous after these findings about its machines."""
    findings, checks = judge_meeting(facts, Judgment(findings=found, checks=(), certain=False))
    return Judgment(findings=tuple(findings[len(found) :]), checks=tuple(checks), certain=False)


# Which nodes explain the pairs that do not work.


def grid(count, bad, untried=()):
    pairs = [(s, t) for s in range(count) for t in range(count) if s != t and (s, t) not in untried]
    return {pair: pair in bad for pair in pairs}


TABLE_LINES = {
    "nothing is bad": (grid(4, ()), []),
    "nothing was tried": ({}, []),
    "a column": (grid(4, column(2)), [(PairSide.INBOUND, (2,))]),
    "a row": (grid(4, row(2)), [(PairSide.OUTBOUND, (2,))]),
    "a cross": (grid(4, column(2) | row(2)), [(PairSide.CUT_OFF, (2,))]),
    "two columns, which make a row look bad": (
        grid(3, column(1, 3) | column(2, 3)), [(PairSide.INBOUND, (1,)), (PairSide.INBOUND, (2,))]
    ),
    "one pair, one way": (grid(4, {(0, 1)}), [(PairSide.PAIR, (0, 1))]),
    "one pair, both ways": (grid(4, {(0, 1), (1, 0)}), [(PairSide.PAIR, (0, 1))]),
    "a column and a pair elsewhere": (
        grid(5, column(2, 5) | {(0, 1)}), [(PairSide.INBOUND, (2,)), (PairSide.PAIR, (0, 1))]
    ),
    "all of them": (grid(3, grid(3, ())), [(PairSide.ALL, (0, 1, 2))]),
    "two nodes, one way": (grid(2, {(0, 1)}), [(PairSide.INBOUND, (1,))]),
    "two nodes, both ways": (grid(2, {(0, 1), (1, 0)}), [(PairSide.ALL, (0, 1))]),
    "a column of which one pair was not tried": (grid(4, column(2) - {(0, 2)}, {(0, 2)}), [(PairSide.INBOUND, (2,))]),
    "the only pair that was tried": ({(0, 1): True}, [(PairSide.INBOUND, (1,))]),
    "one pair tried of a node among many": (grid(4, {(0, 2)}, {(1, 2), (3, 2)}), [(PairSide.PAIR, (0, 2))]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_LINES)
def test_who_explains_it(name):
    tried, wanted = TABLE_LINES[name]
    found = explain(tried)
    assert [(blame.way, blame.nodes) for blame in found] == wanted
    assert {pair for blame in found for pair in blame.pairs} == {pair for pair, bad in tried.items() if bad}


def test_a_single_pair_leaves_both_ends_open():
    assert [blame.alone for blame in explain(grid(2, {(0, 1)}))] == [True]
    assert [blame.alone for blame in explain(grid(3, column(1, 3)))] == [False]


def test_many_nodes_take_no_time():
    (blame,) = explain(grid(300, column(7, 300)))
    assert (blame.way, blame.nodes, len(blame.pairs)) == (PairSide.INBOUND, (7,), 299)


@pytest.mark.parametrize(
    ("duration_s", "words"), [(0.0003, "0.3 ms"), (0.01, "10 ms"), (0.9994, "999 ms"), (1.0, "1.0 s"), (12.5, "12.5 s")]
)
def test_durations_have_the_unit_that_is_read_best(duration_s, words):
    assert say_duration(duration_s) == words


test_rows = table("rendezvous", vars(build), globals())
