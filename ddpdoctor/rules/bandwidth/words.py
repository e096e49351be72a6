"""Bandwidths, shares and intervals in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Change, Curve, Wrong

TWO_PLACES = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER})
"""What torch offers both in place and out of place; of the others the place goes without saying."""


def gb_words(gb_s: float) -> str:
    """Return "466 GB/s", "11.8 GB/s" or "0.85 GB/s": three digits, which is as much as these figures hold."""
    return f"{_digits(gb_s)} GB/s"


def range_words(low: float, high: float | None) -> str:
    """Return "460-480 GB/s", or "460 GB/s" where both ends read alike."""
    if high is None or _digits(low) == _digits(high):
        return gb_words(low)
    return f"{_digits(low)}-{gb_words(high)}"


def time_words(microseconds: float) -> str:
    """Return "34 us", "1.2 ms", "85 ms" or "2.1 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{_digits(microseconds / size)} {unit}"
    return f"{_digits(microseconds)} us"


def share_words(share: float) -> str:
    """Return "98% of", or "268 times" where percents do not read well."""
    return f"{share:.0f} times" if share >= 10 else f"{share:.0%} of"


def name_case(one: Curve | Change | Wrong) -> str:
    """Return "all_reduce float32", with the operator where it is not a sum, and the place where there are two."""
    redop = f" {one.redop}" if one.redop not in {None, "sum"} else ""
    place = " in place" if one.in_place and one.collective in TWO_PLACES else ""
    return f"{one.collective.value} {one.dtype}{redop}{place}"


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
