"""Reads what DDP's reducer complained of. ``recorder/training/reducer.py`` writes it."""

from __future__ import annotations

from typing import Any

from ddpdoctor.collect.rank.frames import read_frame
from ddpdoctor.model.reducer import Fault, ReducerSaid


def read_reducer(entry: Any) -> ReducerSaid | None:
    """Return what is written of one error, or of one backward; None where nothing is, or it is damaged."""
    if not isinstance(entry, dict) or entry.get("what") not in set(Fault):
        return None
    return ReducerSaid(
        what=Fault(entry["what"]),
        names=_texts(entry.get("names")),
        count=int(entry.get("count") or 0),
        of=int(entry.get("of") or 0),
        outputs=_texts(entry.get("outputs")),
        site=read_frame(entry.get("frame")),
    )


def read_unfinished(notes: list[dict[str, Any]]) -> ReducerSaid | None:
    """Return what the last backward left out, of the first model that is still so."""
    last: dict[tuple[str, Any], ReducerSaid | None] = {}
    for note in notes:
        if note.get("k") == "unfinished":
            last[str(note.get("group")), note.get("model")] = read_reducer(note)
    return next((said for said in last.values() if said is not None), None)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
