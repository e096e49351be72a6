"""Durations as people type them: 8, 8.0, 8s, 500ms, 5m, 1h."""

from __future__ import annotations

import math
import re

from ddpdoctor.model.errors import UserError

_UNITS_S = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|)", re.ASCII)


def parse_duration(text: str, option: str) -> float:
    """Return seconds, more than 0. Raises ``UserError``, which names ``option``, for anything else."""
    match = _FORM.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds > 0 and math.isfinite(seconds):
        return seconds
    raise UserError(
        f"{option} is {text!r}, which is no duration above 0",
        help="Give seconds, or a number with a unit: 8, 8.0, 8s, 500ms, 5m, 1h.",
    )
