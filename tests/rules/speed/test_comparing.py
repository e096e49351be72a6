"""Two runs compared: what is called a change, and what is noise."""

from __future__ import annotations

import random

import pytest

from ddpdoctor.model.steps import Budget
from ddpdoctor.rules.speed.comparing import (
    NOISY,
    block_step_s,
    compare_phases,
    compare_steps,
    is_gain,
    measure_effect,
    settings_of,
)
from tests.rules.speed.jobs import Value, rank, state


def noisy(mean_ms: float, spread: float, seed: int) -> Value:
    """Return a part of a step that varies at random from step to step."""
    dice = random.Random(seed)
    values = [mean_ms * dice.gauss(1.0, spread) for _ in range(400)]
    return lambda n: values[n]


def budget(seed: int, steps: int = 200, spread: float = 0.1, **parts_ms: float) -> Budget:
    """Return the budget of two ranks; the parts vary from step to step, each for itself."""
    both = []
    for number in range(2):
        means = {"forward": 32.0, "backward": 62.0, "exposed": 8.0, "data": 4.0, **parts_ms}
        parts = {part: noisy(mean, spread, hash((seed, number, i))) for i, (part, mean) in enumerate(means.items())}
        both.append(rank(number, parts, steps=steps))
    return state(*both).budget


def test_a_shorter_reduction_is_a_change_of_its_phase_and_of_the_step() -> None:
    first, second = budget(1, exposed=31.0), budget(2, exposed=8.0)
    step = compare_steps(first, second)
    assert step.is_change
    assert step.low_ms < step.change_ms < step.high_ms < 0
    assert {one.phase for one in compare_phases(first, second) if one.time.is_change} == {"gradient reduction"}


def test_a_step_that_grew_is_longer() -> None:
    step = compare_steps(budget(1), budget(2, data=40.0))
    assert step.is_change
    assert step.low_ms > 0


def test_two_runs_of_one_job_rarely_differ() -> None:
    """Of intervals of 95%, about one in twenty lies beside the truth."""
    changes = [compare_steps(budget(2 * i, spread=0.3), budget(2 * i + 1, spread=0.3)).is_change for i in range(20)]
    assert sum(changes) <= 3


def test_a_run_that_drifts_has_a_wide_interval() -> None:
    """Neighboring steps are alike here. Resampled one by one, they would seem to be certain of their mean."""
    drifting = state(rank(0, {"forward": lambda n: 50.0 if n % 60 < 30 else 30.0}, steps=240)).budget
    steady = state(rank(0, {"forward": 43.0}, steps=240)).budget
    step = compare_steps(drifting, steady)
    assert step.high_ms - step.low_ms > 5.0
    assert not step.is_change


def test_a_certain_change_of_less_than_a_hundredth_is_none() -> None:
    step = compare_steps(state(rank(0)).budget, state(rank(0, {"forward": 32.5})).budget)
    assert step.low_ms > 0
    assert not step.is_change


def test_blocks_add_up_to_the_mean() -> None:
    found = budget(1, steps=60)
    assert sum(found.blocks_ms) / len(found.blocks_ms) == pytest.approx(found.wall_ms, rel=0.05)
    for row in found.phases:
        assert len(row.blocks_ms) == len(found.blocks_ms)


def test_settings_that_ranks_do_not_share_are_unknown() -> None:
    same = settings_of(state(rank(0, threads=2), rank(1, threads=2)))
    assert (same.rows, same.reductions, same.threads, same.cores) == (8, 1, 2, 2)
    assert same.bucket_cap_bytes is None
    assert settings_of(state(rank(0, threads=2), rank(1, threads=4))).threads is None


# A gain is one that is larger than what a job's own settings differ by between two blocks.


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
