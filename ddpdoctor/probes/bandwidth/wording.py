"""The settings of a bench as a user knows them: by option, with values as they are typed."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.amounts import format_size

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Settings

OPTIONS = {
    "collectives": "--collective",
    "dtypes": "--dtype",
    "redop": "--op",
    "modes": "--mode",
    "min_size_bytes": "--min-size",
    "max_size_bytes": "--max-size",
    "factor": "--factor",
    "backend": "--backend",
    "in_place": "--in-place",
    "cold": "--cold",
    "budget_s": "--budget",
    "iterations": "--iters",
    "warmup": "--warmup",
    "pairs": "--pairs",
    "by_node": "--by-node",
    "hang_timeout_s": "--hang-timeout",
}
"""By field of ``Settings``."""


def describe_setting(settings: Settings, name: str) -> str:
    """Return a setting's value in words: "64 MiB", "float32,bfloat16", "no", "30 s", "not set"."""
    value = getattr(settings, name)
    if name.endswith("_bytes"):
        return format_size(value)
    if name.endswith("_s"):
        return f"{value:g} s"
    return _describe(value)


def _describe(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(_describe, value))
    return str(value.value if isinstance(value, Enum) else value)
