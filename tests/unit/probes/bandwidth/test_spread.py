import random
import statistics

import pytest

from ddpdoctor.probes.bandwidth.spread import coefficient_of_variation, median_interval, quantile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.95, 5.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        (range(101), 0.95, 95.0),
        ([0.0, 10.0], 0.95, 9.5),
    ],
)
def test_a_quantile_is_interpolated(values, share, expected):
    assert quantile(list(values), share) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (1, 0, 0),
        (3, 0, 2),
        (5, 0, 4),
        (9, 0, 8),
        # The 40th and the 61st of a hundred: the table of Conover and of others.
        (100, 39, 60),
        (400, 179, 220),
    ],
)
def test_the_interval_of_the_median_lies_between_two_order_statistics(count, low, high):
    values = list(range(count))
    random.Random(1).shuffle(values)

    assert median_interval(values) == (low, high)


def test_the_interval_holds_the_median_in_about_95_of_100_samples():
    source = random.Random(7)
    # Times have a long tail: the median of this is 1.
    samples = [[source.lognormvariate(0, 1) for _ in range(50)] for _ in range(1000)]

    held = statistics.fmean(low <= 1 <= high for low, high in map(median_interval, samples))

    assert 0.93 < held < 0.985


@pytest.mark.parametrize(("values", "cv"), [([2.0, 2.0], 0.0), ([1.0, 3.0], 0.5), ([4.0], 0.0), ([0.0, 0.0], 0.0)])
def test_the_coefficient_of_variation_is_standard_deviation_over_mean(values, cv):
    assert coefficient_of_variation(values) == pytest.approx(cv)
