"""Reads the values that a rank wrote along with its fingerprints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.rank.frames import read_frame
from ddpdoctor.model.consistency import Values

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SCALE = 1e300
"""Larger or non-finite numbers are not a gradient scale."""


def read_values(rank: int, text: Mapping[str, Any]) -> Values:
    """Return the values of a rank, with defaults for missing or invalid ones."""
    return Values(
        rank=rank,
        steps=_whole(text.get("steps")),
        reductions=_whole(text.get("reductions")),
        forwards=_whole(text.get("forwards")),
        unreduced_forwards=_whole(text.get("unreduced_forwards")),
        settings=_pairs(text.get("settings")),
        optimizer=_text(text.get("optimizer")),
        scale=_number(text.get("scale")),
        random=_text(text.get("random")),
        dropout=text.get("dropout") is True or text.get("dropout") == 1,
        unreduced=_texts(text.get("unreduced")),
        unfinished=_texts(text.get("unfinished")),
        stray=_whole(text.get("stray")),
        unheld=_whole(text.get("unheld")),
        untrained=_texts(text.get("untrained")),
        untrained_count=_whole(text.get("untrained_count")),
        late=_whole(text.get("late")),
        replaced=_texts(text.get("replaced")),
        own_steps=_whole(text.get("own_steps")),
        through=_whole(text.get("through")),
        join=text.get("join") is True or text.get("join") == 1,
        hook=_text(text.get("hook")),
        site=read_frame(text.get("site")),
    )


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _number(value: Any) -> float | None:
    return float(value) if type(value) in {int, float} and abs(value) < MAX_SCALE else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    """Return settings in order, from a list of pairs or a dict."""
    rows = value.items() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return tuple((str(row[0]), str(row[1])) for row in rows if isinstance(row, (list, tuple)) and len(row) == 2)
