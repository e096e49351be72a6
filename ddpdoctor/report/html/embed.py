"""Puts data into a page for its script, so that nothing in it can end the script element or become markup."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from ddpdoctor.report.lines import clean

if TYPE_CHECKING:
    from pathlib import Path

ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def embed(data: Any, folder: Path | None = None) -> str:
    """Return data as JSON in ASCII without a character that HTML reads. Texts are cleaned as everywhere else.

    Paths below ``folder`` lose it.
    """
    text = json.dumps(_cleaned(data, folder), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(ESCAPES)


def _cleaned(data: Any, folder: Path | None) -> Any:
    match data:
        case str():
            return clean(data, folder)
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {name: _cleaned(value, folder) for name, value in data.items()}
        case list() | tuple():
            return [_cleaned(value, folder) for value in data]
        case _:
            return data
