"""Which nodes explain the pairs that do not work."""

import pytest

from ddpdoctor.rules.rendezvous.lines import PairSide, explain
from tests.rules.rendezvous.build import column, row


def grid(count, bad, untried=()):
    pairs = [(s, t) for s in range(count) for t in range(count) if s != t and (s, t) not in untried]
    return {pair: pair in bad for pair in pairs}


TABLE = {
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


@pytest.mark.parametrize("name", TABLE)
def test_who_explains_it(name):
    tried, wanted = TABLE[name]
    found = explain(tried)
    assert [(blame.way, blame.nodes) for blame in found] == wanted
    assert {pair for blame in found for pair in blame.pairs} == {pair for pair, bad in tried.items() if bad}


def test_a_single_pair_leaves_both_ends_open():
    assert [blame.alone for blame in explain(grid(2, {(0, 1)}))] == [True]
    assert [blame.alone for blame in explain(grid(3, column(1, 3)))] == [False]


def test_many_nodes_take_no_time():
    (blame,) = explain(grid(300, column(7, 300)))
    assert (blame.way, blame.nodes, len(blame.pairs)) == (PairSide.INBOUND, (7,), 299)
