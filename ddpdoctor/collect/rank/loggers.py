"""Reads where the ranks of this host log with TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.runfolder import job_of, read_run_folder

if TYPE_CHECKING:
    from collections.abc import Sequence


def read_event_folder(run_dir: Path) -> Path | None:
    """Return the first folder in which the lowest rank that logs has made a writer; None if no rank has.

    Raises:
        UserError: the run folder is damaged.
    """
    folder = read_run_folder(run_dir)
    for rank in sorted(job_of(folder).ranks, key=lambda rank: rank.rank):
        content = folder.rings.contents.get(rank.pid or 0)
        found = _first(content.notes) if content is not None else None
        if found is not None:
            return found
    return None


def _first(notes: Sequence[dict[str, object]]) -> Path | None:
    places = (note.get("folder") for note in notes if note.get("k") == "tensorboard")
    return next((Path(place) for place in places if isinstance(place, str) and place.startswith("/")), None)
