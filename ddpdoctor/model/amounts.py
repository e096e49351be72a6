"""Amounts in words."""

from __future__ import annotations

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_size(size_bytes: int) -> str:
    """Write a size in the largest binary unit that gives a whole number, so nothing is rounded."""
    for unit, size in _UNITS:
        if size_bytes >= size and size_bytes % size == 0:
            return f"{size_bytes // size} {unit}"
    return f"{size_bytes} B"


def format_about(size_bytes: float) -> str:
    """Write a size with three digits: "5.3 MiB", "64 KiB"."""
    unit, size = next(((unit, size) for unit, size in _UNITS if size_bytes >= size), ("B", 1))
    value = size_bytes / size
    return f"{value:.3g} {unit}" if value < 1000 else f"{int(value)} {unit}"


def format_memory(size_bytes: float) -> str:
    """Write "21.0 GiB", or "380 MiB" below one GiB."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"


def format_rate(gb_s: float) -> str:
    """Write "466 GB/s", "11.8 GB/s" or "0.85 GB/s": three digits, because these figures are no more exact."""
    return f"{format_digits(gb_s)} GB/s"


def format_time(time_us: float) -> str:
    """Write "34.0 us", "1.20 ms", "85.0 ms" or "2.10 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(time_us) >= size:
            return f"{format_digits(time_us / size)} {unit}"
    return f"{format_digits(time_us)} us"


def format_digits(value: float) -> str:
    """Write a number with three digits. Trailing zeros stay, because they show how exact it is."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}" if size >= 0.1 or not size else f"{value:.2g}"


def format_age(age_s: float) -> str:
    """Write "40 s", "12 min", "5 h" or "3 days"."""
    for unit, size_s in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * size_s:
            return f"{age_s / size_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def format_span(span_s: float) -> str:
    """Write "3.2 s", "45 s", "2 min 5 s", "41 min", "3 h 12 min" or "2 days 4 h"."""
    if span_s < 99.5:
        return f"{span_s:.1f} s" if span_s < 9.95 else f"{span_s:.0f} s"
    parts = (("days", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    whole = round(span_s) if span_s < 600 else round(span_s / 60) * 60
    at = next(at for at, (unit, size) in enumerate(parts) if whole >= (2 * size if unit == "days" else size))
    (unit, size), (lesser, less) = parts[at : at + 2]
    rest = round(whole % size / less)
    return f"{whole // size} {unit}" + (f" {rest} {lesser}" if rest else "")
