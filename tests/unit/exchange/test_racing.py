"""Of several ways the best that gets through in time is taken, in whatever order they do, and the others are closed."""

import threading
from itertools import permutations

import pytest

from ddpdoctor.exchange.meeting import BETTER_WITHIN_S, race
from ddpdoctor.exchange.store import StoreError

LIMIT_S = 60.0


class Line:
    """Stands for a connection."""

    def __init__(self):
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


class Lane:
    """A way that gets through once ``through`` is set."""

    def __init__(self):
        self.line, self.through = Line(), threading.Event()

    def open(self, limit_s):
        if not self.through.wait(limit_s):
            raise StoreError("blocked")
        return self.line


def race_in_order(order, *, blocked=()):
    """Have three ways get through one after the other; return the winner's place, and the lanes."""
    lanes = [Lane() for _ in range(3)]
    for place in order:
        if place not in blocked:
            lanes[place].through.set()
    return race([lane.open for lane in lanes], LIMIT_S).best, lanes


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_first_wins_where_all_get_through(order):
    winner, lanes = race_in_order(order)
    assert winner == 0
    assert [lane.line.closed.wait(LIMIT_S) for lane in lanes[1:]] == [True, True]
    assert not lanes[0].line.closed.is_set()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_blocked_first_is_not_waited_for(order):
    winner, lanes = race_in_order(order, blocked=(0,))
    assert winner == 1
    assert lanes[2].line.closed.wait(LIMIT_S)
    # It gets through after all: nobody wants it.
    lanes[0].through.set()
    assert lanes[0].line.closed.wait(LIMIT_S)


def test_a_worse_one_that_gets_through_while_a_better_is_waited_for_changes_nothing():
    lanes = [Lane() for _ in range(3)]
    lanes[1].through.set()
    threading.Timer(BETTER_WITHIN_S / 4, lanes[2].through.set).start()
    assert race([lane.open for lane in lanes], LIMIT_S).best == 1


def test_nobody_wins_where_none_gets_through():
    raced = race([Lane().open], 2.0)
    assert (raced.best, raced.errors) == (None, {0: "blocked"})
