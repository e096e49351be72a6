"""More ranks than were run are predicted by a ring and a tree, from what the largest job measured."""

from dataclasses import replace
from math import log, sqrt

import pytest

from ddpdoctor.rules.speed.predictions import (
    SIZES,
    MeasuredSize,
    PredictionBasis,
    predict_sizes,
    ring_cost,
    tree_cost,
    waiting_of,
)
from ddpdoctor.rules.speed.reduction import MIB, BucketGradients, ReductionCost

LINE = ReductionCost(latency_ms=0.5, bytes_per_ms=MIB / 10)
LATE = BucketGradients(
    sizes_bytes=(MIB,) * 16, ready_ms=tuple(10.0 * i for i in range(1, 17)), bucket_bytes=(MIB, 15 * MIB),
    compute_end_ms=160.0, end_ms=310.5,
)  # fmt: skip
BASIS = PredictionBasis(step_ms=400.0, gradients=LATE, networks=(LINE,), assumes="", exposed_ms=150.5)
TWO = MeasuredSize(ranks=2, step_ms=400.0, efficiency=0.6, spread_ms=0.0)


def test_a_ring_of_more_ranks_has_more_hops_and_sends_up_to_twice_as_much() -> None:
    four = ring_cost(LINE, 2, 4)
    assert (four.latency_ms, LINE.bytes_per_ms / four.bytes_per_ms) == pytest.approx((1.5, 1.5))
    assert ring_cost(LINE, 2, 2) == LINE
    assert LINE.bytes_per_ms / ring_cost(LINE, 2, 1024).bytes_per_ms == pytest.approx(2, rel=1e-2)


def test_a_tree_has_a_logarithm_of_hops_and_half_of_the_bandwidth() -> None:
    wide = tree_cost(LINE, 2, 1024)
    assert wide.latency_ms == pytest.approx(2 * 10 * 0.25)
    assert LINE.bytes_per_ms / wide.bytes_per_ms == pytest.approx(2)


def test_the_range_is_over_ring_and_tree_and_grows() -> None:
    sizes = predict_sizes(BASIS, TWO)
    assert tuple(one.ranks for one in sizes) == SIZES
    assert sizes[0].low_ms == pytest.approx(400 + 150 * 0.75 + 0.5 * 6, abs=1)  # a ring of 8: 7 times the hops
    assert all(one.low_ms <= one.high_ms and one.low <= one.high <= 0.6 for one in sizes)
    highs = [one.high_ms for one in sizes]
    assert highs == sorted(highs)


def test_waiting_grows_with_the_spread_of_the_ranks_own_times() -> None:
    assert waiting_of(3.0, 1024) == pytest.approx(3 * sqrt(2 * log(1024)))
    still, spread = predict_sizes(BASIS, TWO), predict_sizes(BASIS, replace(TWO, spread_ms=12.0))
    beyond = 12 * (sqrt(2 * log(8)) - sqrt(2 * log(2)))
    assert spread[0].high_ms - still[0].high_ms == pytest.approx(beyond)
    assert spread[0].waiting_ms == pytest.approx(12 * sqrt(2 * log(8)))


def test_only_sizes_beyond_the_measured_one_are_predicted() -> None:
    assert [one.ranks for one in predict_sizes(BASIS, replace(TWO, ranks=256))] == [512, 1024]


def test_a_hidden_reduction_predicts_nothing() -> None:
    assert predict_sizes(replace(BASIS, networks=()), TWO) == ()
    assert predict_sizes(replace(BASIS, gradients=None), TWO) == ()
