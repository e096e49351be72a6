"""Describes the settings of a bench as the user knows them: by option, with values as typed."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.amounts import format_size

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Settings

NAMES = {
    "collectives": "--collective",
    "dtypes": "--dtype",
    "redop": "--op",
    "modes": "--mode",
    "min_size_bytes": "--min-size",
    "max_size_bytes": "--max-size",
    "budget_s": "--budget",
    "iterations": "--iters",
    "hang_timeout_s": "--hang-timeout",
}
"""Options whose names differ from the field of ``Settings``."""


def describe_settings(settings: Settings) -> dict[str, str]:
    """Return each setting in words, by its option."""
    names = [one.name for one in fields(settings)]
    return {NAMES.get(name, f"--{name.replace('_', '-')}"): describe_setting(settings, name) for name in names}


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
