"""How a wrapped job ended, or stands, as the report of it needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Judgement
    from ddpdoctor.model.run import JobEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a wrapped job ended, or stands."""

    folder: Path
    """Where the record is; the run folder itself, unless that is on a shared file system or takes no more."""
    run_dir: Path
    judgement: Judgement
    end: JobEnd
    failure: Exception | None
    """What first went wrong with the watching or judging itself; the job's own status stands all the same."""
    judged_at: str | None = None
    """Where the report is of the node that has judged the job, as "node0:/scratch/run"; None where it was this one."""

    @property
    def exit_status(self) -> int:
        """Of `wrap`."""
        return self.end.exit_status or 0
