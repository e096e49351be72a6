"""How a wrapped job ended or stands, and what its session tells the user meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.model.findings import Finding, Judgement
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


Cause = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """How the user is told."""

    save: Callable[[Outcome], None]
    """Write report.json."""
    show: Callable[[Outcome], None]
    """Show an outcome."""
    go_on: Callable[[Outcome, bool], None]
    """Show a hang of a job that is not stopped; the flag says that the same was shown, and withdrawn, before."""
    withdraw: Callable[[Judgement], None]
    """Say that a report no longer holds, and remove it."""
    tell_of_replicas: Callable[[Path], bool]
    """Read a run folder, say in a line what is wrong with replicas, and return whether there was anything to say."""


def hangs(judgement: Judgement) -> tuple[Finding, ...]:
    """Return the findings of ranks that wait in vain, the worst first; none where nothing keeps the job from going on.

    Those of replicas and of data are no reason to stop or to watch a job.
    """
    kinds = ("DD6", "DD506")
    return tuple(f for f in judgement.findings if f.severity is Severity.ERROR and f.code.startswith(kinds))


def cause_of(judgement: Judgement) -> Cause:
    """Return what makes two reports of a hang the same: what is wrong, and with whom."""
    return tuple((finding.code, finding.ranks) for finding in hangs(judgement))
