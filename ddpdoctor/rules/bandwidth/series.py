"""The measurements of a bench, sorted into curves: one collective, dtype, operator and mode over all its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.bandwidth import Collective, Measurement, Mode

ENOUGH_ITERATIONS = 5
"""This many calls hold the median between the smallest and the largest with 94 % (1 - 2 / 2**5)."""
FEW_FACTOR = 2.0
"""With fewer calls, the median may be off by this factor. Our choice: the effect of one disturbed call of three on a
shared machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve's measurements by size: at least one, and each size once."""

    collective: Collective
    dtype: str
    redop: str | None
    mode: Mode
    in_place: bool
    points: tuple[Measurement, ...]

    @property
    def element_bytes(self) -> int:
        """Return the size of an element of its dtype."""
        return self.points[0].size_bytes // self.points[0].count


def sort_series(results: Iterable[Measurement]) -> tuple[Series, ...]:
    """Return the curves in the order in which their first points were measured."""
    groups: dict[tuple[Collective, str, str | None, Mode, bool], dict[int, Measurement]] = {}
    for one in results:
        key = (one.collective, one.dtype, one.redop, one.mode, one.in_place)
        groups.setdefault(key, {})[one.size_bytes] = one
    return tuple(
        Series(
            collective=collective, dtype=dtype, redop=redop, mode=mode, in_place=in_place,
            points=tuple(points[size] for size in sorted(points)),
        )
        for (collective, dtype, redop, mode, in_place), points in groups.items()
    )  # fmt: skip


def time_bounds(point: Measurement) -> tuple[float, float]:
    """Return the range in us of the median, from its own interval, or wider if there were few calls."""
    if point.iterations >= ENOUGH_ITERATIONS:
        return point.p50_low_us, point.p50_high_us
    return min(point.p50_low_us, point.p50_us / FEW_FACTOR), max(point.p50_high_us, point.p50_us * FEW_FACTOR)


def time_at(series: Series, size_bytes: float) -> float | None:
    """Return the time in us at a size, interpolated between measured sizes, or None beyond the largest.

    The interpolation uses logarithmic axes, on which these curves are nearly straight from point to point. Below the
    smallest size it returns that size's time: a call costs no less.
    """
    points = series.points
    if size_bytes <= points[0].size_bytes:
        return points[0].p50_us
    for below, above in pairwise(points):
        if size_bytes <= above.size_bytes:
            return _interpolate(size_bytes, (below.size_bytes, below.p50_us), (above.size_bytes, above.p50_us))
    return None


def size_at(series: Series, gb_s: float) -> int | None:
    """Return the size above which the bus bandwidth stays at a value or more, or None if the curve does not cross it.

    The last crossing counts: a curve that rises, falls and rises again stays above it only from there.
    """
    points = [(one.size_bytes, one.busbw_gb_s) for one in series.points if one.busbw_gb_s]
    crossing = None
    for (size, below), (next_size, above) in pairwise(points):
        if below < gb_s <= above:
            crossing = round(_interpolate(gb_s, (below, size), (above, next_size)))
    return crossing


def _interpolate(at: float, one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the value at ``at`` on the line through two points on logarithmic axes."""
    share = math.log(at / one[0]) / math.log(other[0] / one[0])
    return one[1] * math.exp(share * math.log(other[1] / one[1]))
