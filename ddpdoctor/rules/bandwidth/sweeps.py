"""The measurements of a bench, sorted into sweeps: one collective, dtype, operator and mode over all its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.model.words import format_digits, format_rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.bandwidth import Change, Curve, Measurement, Wrong

ENOUGH_ITERATIONS = 5
"""This many calls hold the median between the smallest and the largest with 94 % (1 - 2 / 2**5)."""
FEW_FACTOR = 2.0
"""With fewer calls, the median may be off by this factor. Our choice: the effect of one disturbed call of three on a
shared machine."""
TWO_PLACES = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER})
"""Collectives that torch offers both in place and out of place; for the others the place is not mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One curve's measurements by size: at least one, and each size once."""

    points: tuple[Measurement, ...]

    @property
    def first(self) -> Measurement:
        """Return its smallest size, which also has what all of them share."""
        return self.points[0]

    @property
    def element_bytes(self) -> int:
        """Return the size of an element of its dtype."""
        return self.points[0].size_bytes // self.points[0].count


def sort_sweeps(results: Iterable[Measurement]) -> tuple[Sweep, ...]:
    """Return the curves in the order in which their first points were measured."""
    groups: dict[object, dict[int, Measurement]] = {}
    for one in results:
        groups.setdefault(curve_of(one), {})[one.size_bytes] = one
    return tuple(Sweep(points=tuple(points[size] for size in sorted(points))) for points in groups.values())


def curve_of(one: Measurement) -> tuple[object, ...]:
    """Return what a measurement has in common with the others of its curve."""
    return one.collective, one.dtype, one.redop, one.mode, one.in_place


def time_bounds(point: Measurement) -> tuple[float, float]:
    """Return the range in us of the median, from its own interval, or wider if there were few calls."""
    if point.iterations >= ENOUGH_ITERATIONS:
        return point.p50_low_us, point.p50_high_us
    return min(point.p50_low_us, point.p50_us / FEW_FACTOR), max(point.p50_high_us, point.p50_us * FEW_FACTOR)


def time_at(sweep: Sweep, size_bytes: float) -> float | None:
    """Return the time in us at a size, interpolated between measured sizes, or None beyond the largest.

    The interpolation uses logarithmic axes, on which these curves are nearly straight from point to point. Below the
    smallest size it returns that size's time: a call costs no less.
    """
    points = sweep.points
    if size_bytes <= points[0].size_bytes:
        return points[0].p50_us
    for below, above in pairwise(points):
        if size_bytes <= above.size_bytes:
            return _interpolate(size_bytes, (below.size_bytes, below.p50_us), (above.size_bytes, above.p50_us))
    return None


def size_at(sweep: Sweep, gb_s: float) -> int | None:
    """Return the size above which the bus bandwidth stays at a value or more, or None if the curve does not cross it.

    The last crossing counts: a curve that rises, falls and rises again stays above it only from there.
    """
    points = [(one.size_bytes, one.busbw_gb_s) for one in sweep.points if one.busbw_gb_s]
    crossing = None
    for (size, below), (next_size, above) in pairwise(points):
        if below < gb_s <= above:
            crossing = round(_interpolate(gb_s, (below, size), (above, next_size)))
    return crossing


def _interpolate(at: float, one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the value at ``at`` on the line through two points on logarithmic axes."""
    share = math.log(at / one[0]) / math.log(other[0] / one[0])
    return one[1] * math.exp(share * math.log(other[1] / one[1]))


def range_words(low: float, high: float | None) -> str:
    """Return "460-480 GB/s", or "460 GB/s" if both ends read the same."""
    if high is None or format_rate(low) == format_rate(high):
        return format_rate(low)
    return f"{format_digits(low)}-{format_rate(high)}"


def share_words(share: float) -> str:
    """Return "98% of", or "268 times" if a percentage reads badly."""
    return f"{share:.0f} times" if share >= 10 else f"{share:.0%} of"


def name_case(one: Curve | Change | Wrong) -> str:
    """Return "all_reduce float32", plus the operator if it is not a sum, and the place if there are two."""
    redop = f" {one.redop}" if one.redop not in {None, "sum"} else ""
    place = " in place" if one.in_place and one.collective in TWO_PLACES else ""
    return f"{one.collective.value} {one.dtype}{redop}{place}"
