"""Compares the time budgets of two runs. What varies within each run gives the interval of a change."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ddpdoctor.model.speed_comparison import PhaseChange, TimeChange

from .effects import PART, RESAMPLES, SEED
from .steps import mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.speed import Budget, PhaseRow

LEAST_SHARE = 0.01
"""Of the first run's step. Our choice: a smaller change is called none, however certain it is."""


def compare_steps(first: Budget, second: Budget) -> TimeChange:
    """Return how the mean step changes from one run to another."""
    return _change((first.wall_ms, second.wall_ms), (first.blocks_ms, second.blocks_ms), first.wall_ms)


def compare_phases(first: Budget, second: Budget) -> tuple[PhaseChange, ...]:
    """Return how each phase of the step changes, in the order of the budget."""
    after = {row.phase: row for row in second.phases}
    pairs = [(row, after[row.phase]) for row in first.phases if row.phase in after]
    return tuple(PhaseChange(phase=a.phase, time=_compare_rows(a, b, first.wall_ms)) for a, b in pairs)


def _compare_rows(first: PhaseRow, second: PhaseRow, wall_ms: float) -> TimeChange:
    return _change((first.critical_ms, second.critical_ms), (first.blocks_ms, second.blocks_ms), wall_ms)


def _change(
    means_ms: tuple[float, float], blocks_ms: tuple[Sequence[float], Sequence[float]], wall_ms: float
) -> TimeChange:
    """Return the change between two means. Its interval is the bootstrap interval over the blocks of both runs."""
    dice = random.Random(SEED)  # noqa: S311 - resampling, no secret
    first, second = blocks_ms
    drawn = sorted(_redraw(dice, second) - _redraw(dice, first) for _ in range(RESAMPLES))
    at = int(PART * RESAMPLES)
    low, high = drawn[at], drawn[-1 - at]
    return TimeChange(
        first_ms=means_ms[0],
        second_ms=means_ms[1],
        low_ms=low,
        high_ms=high,
        is_change=(low > 0 or high < 0) and abs(means_ms[1] - means_ms[0]) >= LEAST_SHARE * wall_ms,
    )


def _redraw(dice: random.Random, values: Sequence[float]) -> float:
    return mean(dice.choices(values, k=len(values)))
