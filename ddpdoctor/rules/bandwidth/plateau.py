"""Where a curve is flat: the bandwidth of large messages and the latency of small ones."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size
from ddpdoctor.rules.bandwidth.series import time_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Measurement
    from ddpdoctor.rules.bandwidth.series import Series

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


def find_plateau(series: Series) -> Plateau | None:
    """Return the plateau of the largest sizes, or None if they still rise or fall, or have no bus bandwidth.

    A hump at sizes that fit into a cache is not the plateau: only large messages count.
    """
    levels = levels_of(series)
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


def describe_end(series: Series) -> str:
    """Say why there is no plateau: "it still rises by 40 % from 512 MiB to 1 GiB"."""
    levels = levels_of(series)
    if len(levels) < 2:
        return "one size cannot show it"
    before, last = levels[-2:]
    change = last.gb_s / before.gb_s - 1
    sizes = f"from {format_size(before.size_bytes)} to {format_size(last.size_bytes)}"
    if abs(change) <= ALIKE:
        return f"{sizes} is too short a way to show it"
    return f"it still {'rises' if change > 0 else 'falls'} by {abs(change):.0%} {sizes}"


def find_latency(series: Series) -> float | None:
    """Return the median time in us of the small sizes that take equally long, or None if there are fewer than two."""
    times: list[float] = []
    for point in series.points:
        if times and point.p50_us > min(times) * (1 + LATENCY_ALIKE):
            break
        times.append(point.p50_us)
    return median(times) if len(times) > 1 else None


def levels_of(series: Series) -> tuple[Level, ...]:
    """Return the bus bandwidth of each size, or nothing with one rank."""
    return tuple(_level(point, point.busbw_gb_s) for point in series.points if point.busbw_gb_s)


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
