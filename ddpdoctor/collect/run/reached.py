"""Reads what a node's ``wrap`` saved about its attempts to connect to the other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.run.evidence import load
from ddpdoctor.model.reaching import Connecting

if TYPE_CHECKING:
    from pathlib import Path

FILE = "reached.json"
"""In the run folder: a list of ``Connecting``."""


def load_reached(folder: Path) -> tuple[Connecting, ...]:
    """Return what was saved, or () if it is missing or cannot be read."""
    return load(tuple[Connecting, ...], folder / FILE) or ()
