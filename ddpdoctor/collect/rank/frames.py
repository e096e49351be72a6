"""Reads stack frames in the recorder's format."""

from __future__ import annotations

from typing import Any

from ddpdoctor.model.stacks import Frame


def read_frame(entry: Any) -> Frame | None:
    """Return a frame, or None if the entry is empty or damaged."""
    if not isinstance(entry, dict) or not entry:
        return None
    line = entry.get("l")
    return Frame(
        file=str(entry.get("f", "")),
        line=line if isinstance(line, int) else 0,
        function=str(entry.get("n", "")),
        user=bool(entry.get("u")),
    )


def read_frames(entries: Any) -> tuple[Frame, ...]:
    """Return the frames of a list, without damaged entries."""
    found = map(read_frame, entries if isinstance(entries, list) else ())
    return tuple(frame for frame in found if frame is not None)
