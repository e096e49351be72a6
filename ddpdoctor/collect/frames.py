"""Reads frames as the recorder writes them."""

from __future__ import annotations

from typing import Any

from ddpdoctor.model.facts import Frame


def read_frame(entry: dict[str, Any] | None) -> Frame | None:
    """Return a frame; None where there is none."""
    if not entry:
        return None
    return Frame(
        file=str(entry.get("f", "")), line=int(entry.get("l") or 0), function=str(entry.get("n", "")),
        user=bool(entry.get("u")),
    )  # fmt: skip


def read_frames(entries: Any) -> tuple[Frame, ...]:
    """Return the frames of a list, without those that are none."""
    return tuple(frame for frame in map(read_frame, entries or ()) if frame is not None)
