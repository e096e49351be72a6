"""Reads the values that a rank wrote along with its fingerprints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.recorded import read_record
from ddpdoctor.model.consistency import Values

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SCALE = 1e300
"""Larger or non-finite numbers are not a gradient scale."""


def read_values(rank: int, text: Mapping[str, Any]) -> Values:
    """Return the values of a rank, with defaults for missing or invalid ones."""
    return read_record(Values, text, rank=rank, settings=_pairs(text.get("settings")), scale=_scale(text.get("scale")))


def _scale(value: Any) -> float | None:
    return float(value) if type(value) in {int, float} and abs(value) < MAX_SCALE else None


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    """Return settings in order, from a list of pairs or a dict."""
    rows = value.items() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return tuple((str(row[0]), str(row[1])) for row in rows if isinstance(row, (list, tuple)) and len(row) == 2)
