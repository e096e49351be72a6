"""Reads where the ranks of this host log their training: TensorBoard, W&B, MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.run.runfolder import job_of, read_run_folder
from ddpdoctor.model.facts import Logger

if TYPE_CHECKING:
    from pathlib import Path


def read_loggers(run_dir: Path) -> tuple[Logger, ...]:
    """Return each logger that the ranks use, as the lowest rank that uses it does.

    Raises:
        UserError: the run folder is damaged.
    """
    folder = read_run_folder(run_dir)
    found: dict[str, Logger] = {}
    for rank in sorted(job_of(folder).ranks, key=lambda rank: rank.rank):
        content = folder.rings.contents.get(rank.pid or 0)
        for note in content.notes if content is not None else ():
            logger = _logger(note)
            if logger is not None:
                found.setdefault(logger.name, logger)
    return tuple(found.values())


def _logger(note: dict[str, object]) -> Logger | None:
    name, place = note.get("logger"), note.get("place")
    if note.get("k") != "logger" or not isinstance(name, str) or not isinstance(place, dict):
        return None
    return Logger(name=name, place={str(key): str(value) for key, value in place.items()})
