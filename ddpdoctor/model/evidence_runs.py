"""What was read of a job that nobody watched, sorted by its runs. No judgment, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.model.words import first_names, grouped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.attached import AttachedJob
    from ddpdoctor.model.evidence import Fact, FlightDump


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What one file or stream turned out to be."""

    source: str
    formats: tuple[str, ...]
    """"log", "NCCL log", "flight recorder dump"; empty: nothing was recognized in it."""
    lines: int = 0
    bytes: int = 0
    problem: str = ""
    """Why it could not be read, or not to its end: "cut off", "larger than 64 MiB", "a link out of the folder"."""
    left_out: str = ""
    """Why it was left out, although it could be read: "of another job", "two days older than the others"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRun:
    """All facts about one run of a job."""

    facts: tuple[Fact, ...]
    dumps: tuple[FlightDump, ...] = ()
    """What the flight recorders of its ranks hold."""
    number: int = 0
    """Numbers the runs that were found in the evidence, from 0, in order of time as far as it is known."""
    name: str = ""
    """What tells it from the other runs: "attempt 1", "job 4711", "from line 812"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that was read, sorted by runs. The last run is the one to judge."""

    runs: tuple[EvidenceRun, ...]
    read: tuple[Read, ...]
    attached: tuple[AttachedJob, ...] = ()
    """What `attach` saw of the job, one for each node, without folders that were left out."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many lines, files and bytes were read, recognized and left out."""

    def lacking(self) -> list[str]:
        """Return what could not be read or was left out, a line for all files with one reason."""
        alike = grouped((one.problem or one.left_out, one.source) for one in self.read)
        return [f"{first_names(names, 1)}: {why}" for why, names in alike.items() if why]
