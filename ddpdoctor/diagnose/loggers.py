"""Says where the findings of a job are logged, and at which step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.rank.loggers import read_event_folder

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """A folder with event files of TensorBoard, and the last step of the job."""

    folder: Path
    step: int


def find_log_place(run_dir: Path, report: Report) -> LogPlace | None:
    """Return where to log, or None if no rank of this host used TensorBoard.

    Raises:
        UserError: the run folder is damaged.
    """
    folder = read_event_folder(run_dir)
    if folder is None:
        return None
    return LogPlace(folder=folder, step=max((row.step or 0 for row in report.ranks), default=0))
