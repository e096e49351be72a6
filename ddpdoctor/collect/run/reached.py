"""Reads what a node saw of the places where the others should be, as its ``wrap`` saved it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.run.evidence import DAMAGED, load_json
from ddpdoctor.model.codec import decode
from ddpdoctor.model.reaching import Connecting

if TYPE_CHECKING:
    from pathlib import Path

FILE = "reached.json"
"""In the run folder: a list of ``Connecting``."""


def load_reached(folder: Path) -> tuple[Connecting, ...]:
    """Return what was saved; nothing where nothing was, or it cannot be read."""
    try:
        rows = load_json(folder / FILE)
        return tuple(decode(Connecting, row) for row in rows) if isinstance(rows, list) else ()
    except DAMAGED:
        return ()
