"""Efficiency is measured against honest baselines, and its factors multiply to it."""

from dataclasses import replace

import pytest

from ddpdoctor.model.scaling import LaunchKind, ScalingKind, ScalingLaunch, ScalingRow
from ddpdoctor.model.tuning import TrialRecord, TrialStop, TriedBlock
from ddpdoctor.rules.tuning.efficiency import kind_of, launch_of, measure_scaling

from .jobs import job, rank

ALONE = ScalingLaunch(kind=LaunchKind.ALONE, ranks=1, step_ms=100.0, unreduced_ms=100.0, rows=32.0)
SHARE = ScalingLaunch(kind=LaunchKind.SHARE, ranks=4, step_ms=125.0, unreduced_ms=125.0, rows=32.0)
JOB = ScalingLaunch(kind=LaunchKind.JOB, ranks=4, step_ms=250.0, unreduced_ms=200.0, rows=32.0, noise=0.02)


def measured(*launches: ScalingLaunch) -> ScalingRow:
    (row,) = measure_scaling(launches)
    return row


def test_the_factors_of_weak_scaling_multiply_to_the_efficiency() -> None:
    row = measured(ALONE, SHARE, JOB)
    assert (row.kind, row.efficiency) == (ScalingKind.WEAK, pytest.approx(0.4))
    assert (row.threads, row.contention, row.communication) == pytest.approx((0.8, 0.625, 0.8))
    assert row.threads * row.contention * row.communication == pytest.approx(row.efficiency)
    assert row.noise == 0.02


def test_strong_scaling_counts_the_smaller_batch_of_each_rank() -> None:
    row = measured(ALONE, SHARE, replace(JOB, rows=8.0, step_ms=50.0, unreduced_ms=40.0))
    assert (row.kind, row.efficiency) == (ScalingKind.STRONG, pytest.approx(100 / (4 * 50)))
    assert row.threads * row.contention * row.communication == pytest.approx(row.efficiency)


@pytest.mark.parametrize(
    ("one_rows", "rows", "kind"),
    [
        (32.0, 32.0, ScalingKind.WEAK),
        (32.0, 31.5, ScalingKind.WEAK),
        (32.0, 8.0, ScalingKind.STRONG),
        (32.0, 16.0, ScalingKind.NEITHER),
        (32.0, None, ScalingKind.UNKNOWN),
        (None, 32.0, ScalingKind.UNKNOWN),
    ],
)
def test_the_batch_per_rank_decides_what_was_run(
    one_rows: float | None, rows: float | None, kind: ScalingKind
) -> None:  # fmt: skip
    assert kind_of(one_rows, rows, 4) is kind


def test_without_recorded_batches_steps_are_compared() -> None:
    row = measured(replace(ALONE, rows=None), SHARE, JOB)
    assert (row.kind, row.efficiency) == (ScalingKind.UNKNOWN, pytest.approx(0.4))


def test_reductions_that_cost_nothing_leave_no_communication() -> None:
    assert measured(ALONE, SHARE, replace(JOB, unreduced_ms=251.0)).communication == 1.0


def test_a_size_without_its_baselines_has_no_efficiency() -> None:
    assert measure_scaling([ALONE, JOB]) == ()
    assert measure_scaling([SHARE, JOB]) == ()


def trial(stop: TrialStop = TrialStop.DONE, rounds: int = 4) -> TrialRecord:
    """Return four rounds in which a step takes 100 ms, and without reduction 80 and 84 ms on two ranks."""
    settings = {"base": (100.0, 100.0), "again": (100.0, 100.0), "unreduced": (80.0, 84.0)}
    blocks = tuple(
        TriedBlock(round=number, setting=setting, ranks_ms=tuple((ms,) * 5 for ms in ranks_ms))
        for number in range(rounds) for setting, ranks_ms in settings.items()
    )  # fmt: skip
    return TrialRecord(settings=tuple(settings), rounds=4, blocks=blocks, stop=stop)


def test_a_launch_has_its_step_with_and_without_reduction_its_batch_and_its_spread() -> None:
    launch = launch_of(LaunchKind.JOB, 2, trial(), job(rank(0), rank(1)))
    assert launch is not None
    assert (launch.step_ms, launch.unreduced_ms, launch.rows) == pytest.approx((100.0, 84.0, 8.0))
    assert launch.spread_ms == pytest.approx(2.0)
    assert launch.noise == 0.0


def test_a_launch_whose_trial_was_cut_short_has_no_result() -> None:
    assert launch_of(LaunchKind.JOB, 2, trial(TrialStop.CUT_SHORT, rounds=2), job(rank(0))) is None
