"""A gain is one that is larger than what a job's own settings differ by between two blocks."""

import pytest

from ddpdoctor.rules.speed.comparing import NOISY, block_step_s, is_gain, measure_effect

QUIET = measure_effect([1.0, 1.01, 0.99, 1.0], [1.0, 1.0, 1.0, 1.0])
NOISE = measure_effect([0.8, 1.2, 1.0, 1.1], [1.0, 1.0, 1.0, 1.0])


def test_of_a_step_the_slowest_rank_counts_and_of_a_block_the_median():
    assert block_step_s([[1.0, 5.0, 1.0], [2.0, 2.0, 3.0]]) == 3.0


def test_rounds_are_compared_each_by_itself():
    effect = measure_effect([0.5, 1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0])
    assert (effect.ratio, effect.low, effect.high) == (0.5, 0.5, 0.5)


def test_two_runs_of_the_same_settings_show_the_noise():
    assert QUIET.spread <= NOISY < NOISE.spread


@pytest.mark.parametrize(
    ("blocks", "noise", "gains"),
    [
        ([0.6, 0.62, 0.61, 0.6], QUIET, True),
        ([0.6, 0.62, 0.61, 0.6], NOISE, True),
        ([0.9, 0.9, 0.88, 0.91], NOISE, False),
        ([0.97, 0.97, 0.97, 0.97], QUIET, False),
        ([0.7, 1.2, 0.7, 1.3], QUIET, False),
        ([1.3, 1.3, 1.3, 1.3], QUIET, False),
    ],
)
def test_a_gain_excludes_one_and_is_more_than_the_noise(blocks, noise, gains):
    assert is_gain(measure_effect(blocks, [1.0] * 4), noise) is gains
