"""Everybody meets everybody once, and nobody two at a time."""

from itertools import chain, combinations

import pytest

from ddpdoctor.probes.bandwidth.localize import circle_rounds


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 64])
def test_every_pair_meets_once_in_rounds_that_share_nobody(count):
    rounds = circle_rounds(range(count))

    assert len(rounds) == count - 1 + count % 2
    assert sorted(chain.from_iterable(rounds)) == list(combinations(range(count), 2))
    for pairs in rounds:
        assert len(pairs) == count // 2
        assert len(set(chain.from_iterable(pairs))) == 2 * len(pairs)


@pytest.mark.parametrize("ends", [(), ("a",)])
def test_nobody_to_meet(ends):
    assert circle_rounds(ends) == ()


def test_ends_of_any_kind_in_their_order():
    assert set(chain.from_iterable(circle_rounds(("b", "a", "c")))) == {("b", "a"), ("b", "c"), ("a", "c")}
