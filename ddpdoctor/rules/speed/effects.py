"""How much a setting that a trial tried changes the step: ratios to the script's own settings, with intervals."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RESAMPLES = 2000
SEED = 0
PART = 0.025
"""The share of resamples outside a 95 % interval at each end."""
NOISY = 0.05
"""Of A/A: a wider interval is too noisy to show effects of 5 %, the least that are reported."""
LEAST_GAIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEffect:
    """The ratio of a setting's step time to that of the script's own settings: 0.8 is a step that is 20 % shorter."""

    ratio: float
    low: float
    high: float
    """The ends of the bootstrap 95 % interval."""

    @property
    def spread(self) -> float:
        """Return how far the interval reaches from 1."""
        return max(abs(self.low - 1), abs(self.high - 1))


def block_step_s(ranks: Sequence[Sequence[float]]) -> float:
    """Return a block's step time: of each step that of the slowest rank, and of these the median."""
    slowest: list[float] = [max(step) for step in zip(*ranks, strict=True)]
    return float(median(slowest))


def measure_effect(blocks_s: Sequence[float], base_s: Sequence[float]) -> SettingEffect:
    """Compare a setting with the base, round by round. The interval is that of the median of the ratios."""
    ratios = [block / base for block, base in zip(blocks_s, base_s, strict=True)]
    dice = random.Random(SEED)  # noqa: S311 - resampling, no secret
    medians = sorted(median(dice.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    at = int(PART * RESAMPLES)
    return SettingEffect(ratio=median(ratios), low=medians[at], high=medians[-1 - at])


def is_gain(effect: SettingEffect, noise: SettingEffect) -> bool:
    """Return whether a setting is faster by more than 5 % and more than the noise that A/A shows."""
    gain = 1 - effect.ratio
    return effect.high < 1 and gain >= LEAST_GAIN and gain > noise.spread
