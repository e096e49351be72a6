"""Statistics of a row of times: quantiles, a confidence interval of the median, variation."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Z = 1.96
"""95 % of a normal distribution lie within this many standard deviations."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie, by linear interpolation as in numpy."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of about 95 % for the median, for any distribution.

    Its ends are the values of rank n/2 -+ 1.96 sqrt(n)/2 (Conover, Practical Nonparametric Statistics, 3rd edition,
    section 3.2). With five values or fewer, even the whole range gives less: 94 % with five, 75 % with three.
    """
    ordered = sorted(values)
    half = Z * math.sqrt(len(ordered)) / 2
    low = math.floor(len(ordered) / 2 - half)
    high = math.ceil(len(ordered) / 2 + half)
    return ordered[max(0, low - 1)], ordered[min(len(ordered) - 1, high)]


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Return standard deviation over mean; 0 for a single value."""
    mean = statistics.fmean(values)
    return statistics.pstdev(values, mean) / mean if mean else 0.0
