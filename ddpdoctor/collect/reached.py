"""Reads what a node saw of the places where the others should be, as its ``wrap`` saved it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.reaching import Connecting

if TYPE_CHECKING:
    from pathlib import Path

FILE = "reached.json"
"""In the run folder: a list of ``Connecting``."""


def load_reached(folder: Path) -> tuple[Connecting, ...]:
    """Return what was saved; nothing where nothing was, or it cannot be read."""
    try:
        rows = json.loads((folder / FILE).read_text())
        return tuple(decode(Connecting, row) for row in rows) if isinstance(rows, list) else ()
    except (OSError, ValueError, RecursionError, WrongValue):
        return ()
