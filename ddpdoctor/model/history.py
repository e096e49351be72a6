"""How a job that restarts fared: ``ddpdoctor history``. No I/O.

A start is one attempt of a launcher to run all ranks. torchrun restarts them within one run, a scheduler starts a new
run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import JobStatus

if TYPE_CHECKING:
    from datetime import datetime

HISTORY_FORMAT = "ddpdoctor-history"
HISTORY_VERSION = 1
FAILURES = (JobStatus.FAILED, JobStatus.HUNG)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeen:
    """One pass over the data of a rank."""

    epoch: int
    """The epoch that the script gave to its sampler."""
    steps: int
    """Optimizer steps in this pass, estimated from the batches that a backward followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blamed:
    """A rank, a host, or a rank on a host."""

    rank: int | None = None
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a job. Times are None if they are not known."""

    run: str
    """The run folder."""
    attempt: int
    """Counted from 0 within the run folder."""
    status: JobStatus
    began_at: datetime | None
    first_step_at: datetime | None
    """When its first step ended; None if it made none."""
    last_progress_at: datetime | None
    """When its last step ended."""
    ended_at: datetime | None
    """None if it still runs."""
    steps: int
    """The last step that a rank reached, counted from this start."""
    saved_step: int | None = None
    """The step at which it last saved something with torch.save; None if it did not, or if that is not known."""
    passes: tuple[PassSeen, ...] = ()
    """The passes over the data of one rank, without a gap from the last one backwards."""
    first_epoch: int | None = None
    """The epoch of its first pass, or None if the script gives its sampler no epochs."""
    hosts: int = 1
    code: str = ""
    """The code of the verdict, such as DD605; empty if there is none."""
    kind: str = ""
    summary: str = ""
    """The sentence of the verdict."""
    blamed: tuple[Blamed, ...] = ()
    """Each rank that the verdict blames with its host, or hosts; empty if it blames all."""

    @property
    def failed(self) -> bool:
        """Whether it ended with a failure. An interruption by a user or a scheduler is none."""
        return self.status in FAILURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the end of a start cost before the job went on."""

    steps: int | None
    """Steps that were made again, at most; None if that is not known."""
    seconds: float | None
    """From the last progress to the first step of the next start; None if there is no next one, or it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """Who is blamed in the verdicts of several failures."""

    who: Blamed
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All starts of one job, the first one first."""

    command: tuple[str, ...]
    starts: tuple[Start, ...]
    costs: tuple[Cost, ...]
    """One for each start."""
    failures: int
    span_s: float | None
    """From the first start to the end of the last, or to now if it runs."""
    between_failures_s: float | None
    """The mean time between failures: the time in which it ran, divided by the failures. None without a failure."""
    returning: tuple[Returning, ...]
    """The most frequent first."""
