"""Bandwidths, shares and intervals in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_digits, format_rate
from ddpdoctor.model.bandwidth import Collective

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Change, Curve, Wrong

TWO_PLACES = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER})
"""Collectives that torch offers both in place and out of place; for the others the place is not mentioned."""


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
