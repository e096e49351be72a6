"""What a curve looks like: where it is flat, and a fit of t(S) = alpha + S / bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Fit
from ddpdoctor.model.words import format_size
from ddpdoctor.rules.bandwidth.sweeps import time_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Measurement
    from ddpdoctor.rules.bandwidth.sweeps import Sweep

ALIKE = 0.05
"""Sizes are on one plateau if their bandwidths differ by at most this. Our choice: by alpha + S/B, a curve that gains
less from twice the size is at 95 % of what it can reach."""
MOST_NOISE = 0.25
"""However wide their intervals, sizes whose medians differ by more are not on one plateau. Our choice: noise may hide a
slope, and must not turn it into a plateau."""
SPAN = 2
"""A plateau's largest size is at least this many times its smallest: two neighboring sizes prove nothing."""
LATENCY_ALIKE = 0.25
"""The times of small sizes count as independent of the size if they differ by at most this. Our choice: the steps of
real curves below 64 KiB are smaller, and if the size matters, twice the size costs more."""
FEWEST_SIZES = 4
"""Two points give any line. Our choice: two more show whether it fits."""
MOST_RESIDUAL = 0.10
"""Our choice: a healthy curve over NVLink, on which the algorithm changes with the size, leaves 11 % (8 H200,
https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/results/all-reduce-8xH200.md). Its two figures
then mean nothing: in the middle the line is off by 19 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """The bus bandwidth of the largest sizes, in GB/s, with an interval of about 95 % for the medians behind it."""

    gb_s: float
    low_gb_s: float
    high_gb_s: float
    spread: float
    from_bytes: int
    to_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The bus bandwidth at one size in GB/s, with its interval."""

    size_bytes: int
    gb_s: float
    low: float
    high: float


def find_plateau(sweep: Sweep) -> Plateau | None:
    """Return the plateau of the largest sizes, or None if they still rise or fall, or have no bus bandwidth.

    A hump at sizes that fit into a cache is not the plateau: only large messages count.
    """
    levels = levels_of(sweep)
    flat: list[Level] = []
    for level in reversed(levels):
        if not _alike([*flat, level]):
            break
        flat.append(level)
    if not flat or flat[0].size_bytes < SPAN * flat[-1].size_bytes:
        return None
    values = [level.gb_s for level in flat]
    middle = median(values)
    return Plateau(
        gb_s=middle,
        low_gb_s=median(level.low for level in flat),
        high_gb_s=median(level.high for level in flat),
        spread=(max(values) - min(values)) / middle,
        from_bytes=flat[-1].size_bytes,
        to_bytes=flat[0].size_bytes,
    )


def describe_end(sweep: Sweep) -> str:
    """Say why there is no plateau: "it still rises by 40 % from 512 MiB to 1 GiB"."""
    levels = levels_of(sweep)
    if len(levels) < 2:
        return "one size is not enough"
    before, last = levels[-2:]
    change = last.gb_s / before.gb_s - 1
    sizes = f"from {format_size(before.size_bytes)} to {format_size(last.size_bytes)}"
    if abs(change) <= ALIKE:
        return f"the range {sizes} is too small"
    return f"it still {'rises' if change > 0 else 'falls'} by {abs(change):.0%} {sizes}"


def find_latency(sweep: Sweep) -> float | None:
    """Return the median time in us of the small sizes that take equally long, or None if there are fewer than two."""
    times: list[float] = []
    for point in sweep.points:
        if times and point.p50_us > min(times) * (1 + LATENCY_ALIKE):
            break
        times.append(point.p50_us)
    return median(times) if len(times) > 1 else None


def levels_of(sweep: Sweep) -> tuple[Level, ...]:
    """Return the bus bandwidth of each size, or nothing with one rank."""
    return tuple(_level(point, point.busbw_gb_s) for point in sweep.points if point.busbw_gb_s)


def _level(point: Measurement, gb_s: float) -> Level:
    least_us, most_us = time_bounds(point)
    return Level(
        size_bytes=point.size_bytes,
        gb_s=gb_s,
        low=gb_s * point.p50_us / most_us,
        high=gb_s * point.p50_us / least_us,
    )


def _alike(levels: Sequence[Level]) -> bool:
    values = [level.gb_s for level in levels]
    if max(values) > min(values) * (1 + MOST_NOISE):
        return False
    return max(level.low for level in levels) <= min(level.high for level in levels) * (1 + ALIKE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLine:
    """A fitted line, with variances computed from its own residual."""

    alpha_us: float
    us_per_byte: float
    residual: float
    """Root mean square of the relative errors."""
    var_alpha: float
    var_slope: float
    covariance: float

    @property
    def fits(self) -> bool:
        """Whether the line fits well enough for its two figures to mean something."""
        return self.residual <= MOST_RESIDUAL and self.alpha_us > 0 and self.us_per_byte > 0


def fit_line(sweep: Sweep) -> FittedLine | None:
    """Fit p50 over size. Each point has the weight 1 / p50**2, so that small sizes count as much as large ones.

    Return None for fewer than four sizes.
    """
    points = [(one.size_bytes, one.p50_us) for one in sweep.points]
    if len(points) < FEWEST_SIZES:
        return None
    weights = [1 / time**2 for _, time in points]
    total = sum(weights)
    sum_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True))
    sum_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True))
    sum_xx = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    sum_xy = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
    determinant = total * sum_xx - sum_x**2
    slope = (total * sum_xy - sum_x * sum_y) / determinant
    alpha = (sum_y - slope * sum_x) / total
    squares = sum(((alpha + slope * x - y) / y) ** 2 for x, y in points)
    variance = squares / (len(points) - 2)
    return FittedLine(
        alpha_us=alpha,
        us_per_byte=slope,
        residual=math.sqrt(squares / len(points)),
        var_alpha=variance * sum_xx / determinant,
        var_slope=variance * total / determinant,
        covariance=-variance * sum_x / determinant,
    )


def fit_of(line: FittedLine | None) -> Fit | None:
    """Return a line in the form of the report. A line that falls with the size has no bandwidth: None."""
    if line is None or line.us_per_byte <= 0:
        return None
    return Fit(
        alpha_us=line.alpha_us,
        bandwidth_gb_s=1 / line.us_per_byte / 1e3,
        residual=line.residual,
        fits=line.fits,
    )
