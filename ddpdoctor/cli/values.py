"""Parses values that users type: durations (5m), sizes (1MiB), shares (90%), bandwidths (460GB/s), counts, ports."""

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
"""A single letter is binary, as in nccl-tests' -b 8M."""
_RATE_UNITS = {"": 1.0, "gb/s": 1.0, "gbps": 0.125, "gbit/s": 0.125, "mb/s": 1e-3, "tb/s": 1e3}
_DURATION_UNITS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


_MAX_DIGITS = 9
"""Most digits of a whole number. Our choice: no count has more."""
MAX_PORT = 65_535


def parse_duration(text: str, option: str) -> float:
    """Parse a duration above 0 and return seconds. Raises ``UserError``, which names ``option``, for anything else."""
    seconds = _parse(text, _DURATION_UNITS)
    if seconds is None or seconds <= 0:
        raise UserError(
            f"{option} is {text!r}, which is not a duration above 0",
            help="Give seconds, or a number with a unit: 8, 8.0, 8s, 500ms, 5m, 1h.",
        )
    return seconds


def parse_steps(text: str, option: str) -> int:
    """Parse a whole number of steps, at least 1. Raises ``UserError``."""
    steps = _parse_whole(text)
    if steps < 1:
        raise UserError(
            f"{option} is {text!r}, which is not a whole number of steps from 1 on",
            help="Give a number of optimizer steps such as 50, or auto, or turn it off with --no-consistency.",
        )
    return steps


def parse_port(text: str, option: str) -> int:
    """Parse a port, which must be the same on all nodes. Raises ``UserError``."""
    port = _parse_whole(text)
    if not 0 < port <= MAX_PORT:
        raise UserError(
            f"{option} is {text!r}, which is not a port",
            help=f"Give a number from 1 to {MAX_PORT}, the same on all nodes.",
        )
    return port


def parse_ports(text: str, option: str) -> tuple[int, int]:
    """Parse a range of ports, "40000-40100", and return both ends. Raises ``UserError``."""
    low, _, high = text.strip().partition("-")
    ends = _parse_whole(low), _parse_whole(high)
    if not 0 < ends[0] <= ends[1] <= MAX_PORT:
        raise UserError(f"{option} {text} is not a range of ports", help="Give a range such as 40000-40100.")
    return ends


def parse_size(text: str, option: str) -> int:
    """Parse a size and return bytes, at least 1. Raises ``UserError``, which names ``option``."""
    size = _parse(text, _SIZE_UNITS)
    if size is None or size < 1 or size != int(size):
        raise UserError(
            f"{option} is {text!r}, which is not a size in whole bytes",
            help="Give bytes, or a unit: 4096, 1KiB, 64MiB.",
        )
    return int(size)


def parse_share(text: str, option: str) -> float:
    """Parse "90%" or "0.9" and return a share above 0 and up to 1. Raises ``UserError``."""
    number = text.strip()
    share = _parse(number.removesuffix("%"), {"": 0.01 if number.endswith("%") else 1.0})
    if share is None or not 0 < share <= 1:
        raise UserError(f"{option} is {text!r}, which is not a share up to 100%", help="Give a percentage: 90%.")
    return share


def parse_bandwidth(text: str, option: str) -> float:
    """Parse "460", "460GB/s" or "400Gbit/s" and return GB/s (1e9 bytes), above 0. Raises ``UserError``."""
    rate = _parse(text, _RATE_UNITS)
    if rate is None or rate <= 0:
        raise UserError(
            f"{option} is {text!r}, which is not a bandwidth",
            help="Give gigabytes per second: 460, 460GB/s; or 400Gbit/s.",
        )
    return rate


def parse_count(text: str, option: str) -> int:
    """Parse "350M" or "7B" and return a number of parameters, at least 1. Raises ``UserError``."""
    count = _parse(text, _COUNT_UNITS)
    if count is None or count < 1:
        raise UserError(
            f"{option} is {text!r}, which is not a number of parameters", help="Give a number, or a unit: 350M, 1.5B."
        )
    return round(count)


def _parse_whole(text: str) -> int:
    """Return a whole number, or 0 if the text is not one."""
    return int(text) if text.strip().isdecimal() and text.isascii() and len(text.strip()) <= _MAX_DIGITS else 0


def _parse(text: str, units: dict[str, int] | dict[str, float]) -> float | None:
    names = "|".join(re.escape(name) for name in units)
    match = re.fullmatch(rf"{_NUMBER}({names})", text.strip().lower(), re.ASCII)
    number = float(match[1]) * units[match[2]] if match else math.inf
    return number if math.isfinite(number) else None
