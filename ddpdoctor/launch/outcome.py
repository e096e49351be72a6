"""The outcome of a wrapped job, and the callbacks by which its session informs the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import hangs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.model.facts import JobEnd
    from ddpdoctor.model.findings import Judgment


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a wrapped job ended, or its state so far."""

    folder: Path
    """The folder with the record: the run folder, unless that is on a shared file system or full."""
    run_dir: Path
    judgment: Judgment
    end: JobEnd
    failure: Exception | None
    """The first error in watching or judging. It does not change the job's own exit status."""
    repeats: bool = False
    """The job ended during a hang that was shown while it ran."""
    judged_at: str | None = None
    """The report's place on the node that judged the job, such as "node0:/scratch/run"; None if it was this node."""

    @property
    def exit_status(self) -> int:
        """The exit status of `wrap`."""
        return self.end.exit_status or 0


Cause = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notifier:
    """Callbacks that inform the user."""

    started: Callable[[Path], None]
    """Take the folder of the record, once the launcher has started."""
    save: Callable[[JobOutcome], None]
    """Write report.json."""
    show: Callable[[JobOutcome], None]
    """Show an outcome."""
    go_on: Callable[[JobOutcome, bool], None]
    """Show a hang of a job that is not stopped. The flag is True if the same hang was shown and withdrawn before."""
    withdraw: Callable[[Judgment], None]
    """Announce that a report no longer holds, and remove it."""
    report_crash: Callable[[str], None]
    """Say that a check crashed while the job runs, and which."""
    report_replicas: Callable[[Path, frozenset[str]], frozenset[str]]
    """Read a run folder, print a line for each finding about its replicas and gradients whose code is not among those
    given, and return the codes."""


def cause_of(judgment: Judgment) -> Cause:
    """Return the codes and ranks of a hang. Two reports with the same ones are the same hang."""
    return tuple((finding.code, finding.ranks) for finding in hangs(judgment))
