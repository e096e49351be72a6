"""Parses JSON that anybody may have written: a run folder is passed on, and comes back changed."""

from __future__ import annotations

import json

from .files import check_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def parse_json(data: bytes) -> Any:
    """Return what JSON says; bytes that are no UTF-8 are replaced.

    Raises:
        ValueError: it is damaged, nested too deeply, or has more values than ``check_json`` allows.
    """
    try:
        return json.loads(check_json(data).decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
