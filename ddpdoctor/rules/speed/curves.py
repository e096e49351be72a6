"""How long an all-reduce takes by its size, as ``allreduce-bench`` measured it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import exp, log
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective, Mode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.bandwidth import Measurement

LEAST_SIZES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCurve:
    """Times of all-reduces, by rising size, between some number of ranks."""

    ranks: int
    sizes_bytes: tuple[int, ...]
    times_ms: tuple[float, ...]

    def time_ms(self, size_bytes: float) -> float:
        """Return the time of one bucket: between two sizes by the power law through both, beyond all in proportion."""
        sizes, times = self.sizes_bytes, self.times_ms
        if size_bytes <= sizes[0]:
            return times[0]
        if size_bytes >= sizes[-1]:
            return times[-1] * size_bytes / sizes[-1]
        above = bisect_left(sizes, size_bytes)
        part = log(size_bytes / sizes[above - 1]) / log(sizes[above] / sizes[above - 1])
        return exp(log(times[above - 1]) * (1 - part) + log(times[above]) * part)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurves:
    """A curve, and the ends of the 95 % intervals of its points."""

    low: ReductionCurve
    mid: ReductionCurve
    high: ReductionCurve

    @property
    def all(self) -> tuple[ReductionCurve, ...]:
        """All three."""
        return self.low, self.mid, self.high


def curves_of(results: Iterable[Measurement], ranks: int) -> MeasuredCurves | None:
    """Return the curve of float32 all-reduces among measurements, or None if too few sizes were measured.

    Buckets follow each other without a pause, as the calls of the throughput mode do.
    """
    by_mode: dict[Mode, list[Measurement]] = {}
    for one in results:
        if one.collective is Collective.ALL_REDUCE and one.dtype == "float32":
            by_mode.setdefault(one.mode, []).append(one)
    chosen = by_mode.get(Mode.THROUGHPUT) or by_mode.get(Mode.LATENCY) or []
    points = sorted(chosen, key=lambda one: one.size_bytes)
    if len(points) < LEAST_SIZES:
        return None
    sizes = tuple(one.size_bytes for one in points)
    low, mid, high = (
        ReductionCurve(ranks=ranks, sizes_bytes=sizes, times_ms=tuple(us / 1e3 for us in column))
        for column in zip(*((one.p50_low_us, one.p50_us, one.p50_high_us) for one in points), strict=True)
    )
    return MeasuredCurves(low=low, mid=mid, high=high)


def scaled_to(curves: MeasuredCurves, ranks: int) -> MeasuredCurves:
    """Return the curves for another number of ranks, by the bytes that a ring moves: 2 (N - 1) / N of the size.

    Patarasuk and Yuan, 2009.
    """
    if ranks == curves.mid.ranks or ranks < 2 or curves.mid.ranks < 2:
        return curves
    factor = ring_factor(ranks) / ring_factor(curves.mid.ranks)
    low, mid, high = (
        replace(one, ranks=ranks, times_ms=tuple(factor * time for time in one.times_ms)) for one in curves.all
    )
    return MeasuredCurves(low=low, mid=mid, high=high)


def ring_factor(ranks: int) -> float:
    """Return how many times the size a rank sends in a ring all-reduce."""
    return 2 * (ranks - 1) / ranks
