"""Reads back what a rank noted of its local gradients. ``recorder/gradients/findings.py`` writes it."""

from __future__ import annotations

from typing import Any

from ddpdoctor.collect.rank.frames import read_frame
from ddpdoctor.model.consistency import NonFinite, Origin


def read_nonfinite(notes: list[dict[str, Any]]) -> tuple[NonFinite, ...] | None:
    """Return the findings in the order in which they were made; None where gradients were not looked at.

    A finding is noted again where more of it shows: the last note of each holds.
    """
    found = {note["id"]: note for note in notes if note.get("k") == "nonfinite" and isinstance(note.get("id"), int)}
    if not found and not any(note.get("k") == "gradients" for note in notes):
        return None
    return tuple(map(_finding, found.values()))


def _finding(note: dict[str, Any]) -> NonFinite:
    return NonFinite(
        step=int(note.get("step") or 0),
        model=int(note.get("model") or 0),
        group=str(note.get("group", "")),
        tensors=tuple(map(str, note.get("tensors") or ())),
        count=int(note.get("count") or 0),
        of=int(note.get("of") or 0),
        origin=Origin(note.get("origin")),
        is_nan=bool(note.get("nan")),
        scaled=bool(note.get("scaled")),
        used=bool(note.get("used")),
        times=int(note.get("times") or 1),
        in_a_row=int(note.get("row") or 1),
        where=read_frame(note.get("frame")),
        note=str(note.get("note", "")),
    )
