"""A bench against a saved one: size by size, never over an average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Measurement, Member, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a saved report holds that a later bench can be compared with."""

    name: str
    """The file, as the user gave it."""
    results: tuple[Measurement, ...]
    members: tuple[Member, ...]
    settings: Settings
