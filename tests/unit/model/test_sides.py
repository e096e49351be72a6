"""Sides: who has the same, and who is outside the majority."""

import pytest

from ddpdoctor.model.sides import group_alike, grouped, majority_of, outvoted


def test_values_and_their_items_keep_their_order():
    assert list(grouped([("b", 3), ("a", 1), ("b", 2)]).items()) == [("b", [3, 2]), ("a", [1])]


def test_the_side_of_the_most_is_first_and_of_equal_ones_that_of_the_lowest_rank():
    assert group_alike({3: "x", 0: "y", 2: "z", 1: "z"}) == [("z", (1, 2)), ("y", (0,)), ("x", (3,))]


@pytest.mark.parametrize(
    ("sides", "majority", "others"),
    [
        ([(0, 2), (1,)], (0, 2), (1,)),
        ([(1,), (0, 2, 3), (4,)], (0, 2, 3), (1, 4)),
        ([(0,), (1,)], (), (0, 1)),
        ([(2, 3), (0,), (1,)], (), (0, 1, 2, 3)),
        ([(0, 1)], (0, 1), ()),
        ([], (), ()),
    ],
)
def test_only_more_than_half_is_a_majority(sides, majority, others):
    assert majority_of(sides) == majority
    assert outvoted(sides) == others
