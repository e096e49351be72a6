"""Formats times, bandwidths and shares with only significant digits."""

from __future__ import annotations

import math

NOT_DEFINED = "n/a"


def format_us(time_us: float) -> str:
    """Write microseconds as nccl-tests does: two decimals below 100, one below 10000, then none."""
    if not math.isfinite(time_us):
        return NOT_DEFINED
    return f"{time_us:.{2 if time_us < 100 else 1 if time_us < 10000 else 0}f}"


def format_gb_s(gb_s: float | None) -> str:
    """Write a bandwidth with two decimals as nccl-tests does, or four below 1. "n/a" means that there is none."""
    if gb_s is None or not math.isfinite(gb_s):
        return NOT_DEFINED
    return f"{gb_s:.{2 if gb_s >= 1 else 4}f}"


def format_share(share: float) -> str:
    """Write a share as a percentage: "3%", "0.4%"."""
    if not math.isfinite(share):
        return NOT_DEFINED
    percent = share * 100
    return f"{percent:.1f}%" if 0 < abs(percent) < 1 else f"{percent:.0f}%"
