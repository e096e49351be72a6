"""Amounts as people type them: sizes (1MiB, 4096), shares (90%), bandwidths (460GB/s), parameters (350M)."""

from __future__ import annotations

import math
import re

from ddpdoctor.model.errors import UserError

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)\s*"
_SIZE_UNITS = {
    "": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
"""A bare letter is binary, as nccl-tests' -b 8M is."""
_RATE_UNITS = {"": 1.0, "gb/s": 1.0, "gbps": 0.125, "gbit/s": 0.125, "mb/s": 1e-3, "tb/s": 1e3}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def parse_size(text: str, option: str) -> int:
    """Return bytes, at least 1. Raises ``UserError``, which names ``option``."""
    size = _parse(text, _SIZE_UNITS)
    if size is None or size < 1 or size != int(size):
        raise UserError(
            f"{option} is {text!r}, which is no size in whole bytes", help="Give bytes, or a unit: 4096, 1KiB, 64MiB."
        )
    return int(size)


def parse_share(text: str, option: str) -> float:
    """Return a share above 0 and up to 1 of "90%" or "0.9". Raises ``UserError``."""
    number = text.strip()
    share = _parse(number.removesuffix("%"), {"": 0.01 if number.endswith("%") else 1.0})
    if share is None or not 0 < share <= 1:
        raise UserError(f"{option} is {text!r}, which is no share up to 100%", help="Give a percentage: 90%.")
    return share


def parse_bandwidth(text: str, option: str) -> float:
    """Return GB/s (1e9 bytes), above 0, of "460", "460GB/s" or "400Gbit/s". Raises ``UserError``."""
    rate = _parse(text, _RATE_UNITS)
    if rate is None or rate <= 0:
        raise UserError(
            f"{option} is {text!r}, which is no bandwidth", help="Give gigabytes a second: 460, 460GB/s; or 400Gbit/s."
        )
    return rate


def parse_count(text: str, option: str) -> int:
    """Return a number of parameters, at least 1, of "350M" or "7B". Raises ``UserError``."""
    count = _parse(text, _COUNT_UNITS)
    if count is None or count < 1:
        raise UserError(
            f"{option} is {text!r}, which is no number of parameters", help="Give a number, or a unit: 350M, 1.5B."
        )
    return round(count)


def _parse(text: str, units: dict[str, int] | dict[str, float]) -> float | None:
    names = "|".join(re.escape(name) for name in units)
    match = re.fullmatch(rf"{_NUMBER}({names})", text.strip().lower(), re.ASCII)
    number = float(match[1]) * units[match[2]] if match else math.inf
    return number if math.isfinite(number) else None
