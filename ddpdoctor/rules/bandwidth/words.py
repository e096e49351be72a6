"""Bandwidths, shares and intervals in sentences."""

from __future__ import annotations


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


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
