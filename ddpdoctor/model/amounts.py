"""Amounts in words."""

from __future__ import annotations

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_size(size_bytes: int) -> str:
    """Write a size in the largest binary unit in which it is a whole number, so that rounding is never hidden."""
    for unit, size in _UNITS:
        if size_bytes >= size and size_bytes % size == 0:
            return f"{size_bytes // size} {unit}"
    return f"{size_bytes} B"
