"""The conclusions from the facts: findings, outcomes of checks, and the report. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from ddpdoctor.model.errors import ExitStatus

SCHEMA_VERSION = 1


class Severity(str, Enum):
    """How bad a finding is; ``order`` sorts the worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    def __init__(self, _value: str) -> None:
        self.order = len(type(self).__members__)


class Confidence(str, Enum):
    """How certain a finding is about the ranks that it blames."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Outcome(str, Enum):
    """How a check ended. For a check that did not run, ``Check.reason`` holds the reason."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    INCONCLUSIVE = "inconclusive"
    CRASHED = "crashed"


class FaultOrigin(str, Enum):
    """Where a fault lies. A scheduler starts a job again elsewhere only for the first two."""

    MACHINE = "machine"  # hardware, or a host that is gone
    NETWORK = "network"
    SETTINGS = "settings"  # how the job is installed, configured or started
    SCRIPT = "script"


class JobStatus(str, Enum):
    """How the job ended."""

    FINISHED = "finished"
    FAILED = "failed"
    HUNG = "hung"
    INTERRUPTED = "interrupted"
    NOT_RUN = "not-run"
    RUNNING = "running"  # the job went on after the report: a report of a hang can be withdrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of code on a rank. The user's own line comes first, never a frame inside torch."""

    rank: int
    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem: the ranks and hosts affected, the evidence, and what to do."""

    code: str
    kind: str
    severity: Severity
    confidence: Confidence
    summary: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    where: tuple[Place, ...] = ()
    step: int | None = None
    tensor: str | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""
    share: float | None = None  # how much of the step the fix recovers at most, 0 to 1; None: not about speed
    origin: FaultOrigin | None = None  # Where the fault lies. None if that is not known.


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of one rule."""

    id: str
    outcome: Outcome
    reason: str = ""  # why it did not run or could not tell
    code: str = ""
    group: str = ""  # the heading under which `check-env` shows it
    seen: str = ""  # what it found, if it ran
    hosts: tuple[str, ...] = ()  # the hosts with this outcome; empty: all hosts that ran it


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """The result of the progress rules for a job."""

    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    certain: bool  # all evidence says that the job hangs: every rank waits or makes no progress
    proven: bool = False  # a rank it needs is gone, its calls conflict, or torch's own limit has passed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A row of the report's table of ranks."""

    rank: int
    local_rank: int | None
    host: str
    pid: int | None
    state: str  # one phrase: "in all_reduce", "in backward", "exit status 1", "killed by SIGKILL"
    where: Place | None = None
    step: int | None = None
    gpu: int | None = None
    starved_s: float = 0.0  # seconds without progress in which it, or a child, was ready to run and got no core
    # The main thread's frames in the last sample, or of the error that ended it, outermost first, as "file:line
    # function".
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a job that its launcher restarted: ``data.sections`` of a report. Times are ISO 8601, UTC."""

    attempt: int  # counted from 0, as in torchrun
    started_at: str | None
    ended_at: str | None
    seconds: float | None  # from the start of its first rank to the end of its last
    status: JobStatus  # "interrupted" if it was restarted though nothing was wrong, as when a node joined
    verdict: Finding | None
    findings: tuple[Finding, ...]
    ranks: tuple[RankRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """How the job as a whole ended."""

    world_size: int | None
    nnodes: int
    status: JobStatus
    exit_status: int | None

    @property
    def ended_badly(self) -> bool:
        """It ran but did not finish."""
        return self.status in {JobStatus.FAILED, JobStatus.HUNG, JobStatus.INTERRUPTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The output of every command. See ``report/schema.json`` for the form on disk."""

    command: tuple[str, ...]
    started_at: str
    ended_at: str
    job: JobSummary | None
    verdict: Finding | None
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    ranks: tuple[RankRow, ...]
    data: dict[str, Any] = field(default_factory=dict)
    tool_version: str = ""

    def has_found(self, fail_on: Severity | None) -> bool:
        """Return whether it has a finding at least as severe as ``fail_on``. None means "never"."""
        return fail_on is not None and any(finding.severity.order <= fail_on.order for finding in self.findings)

    def exit_status(self, fail_on: Severity | None) -> ExitStatus:
        """Return its status: findings take precedence, then crashed checks, then inconclusive ones."""
        if self.has_found(fail_on):
            return ExitStatus.FOUND
        outcomes = {check.outcome for check in self.checks}
        if Outcome.CRASHED in outcomes:
            return ExitStatus.DEFECT
        return ExitStatus.INCONCLUSIVE if Outcome.INCONCLUSIVE in outcomes else ExitStatus.OK


def as_earlier(attempt: Attempt) -> tuple[Finding, ...]:
    """Return an attempt's findings for the whole job. Since the launcher recovered, they are at most warnings."""
    return tuple(
        replace(
            finding,
            severity=Severity.WARNING if finding.severity is Severity.ERROR else finding.severity,
            summary=f"attempt {attempt.attempt}, since restarted: {finding.summary}",
        )
        for finding in attempt.findings
    )


def now() -> str:
    """Return the current time in the format of reports: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def hangs(judgment: Judgment) -> tuple[Finding, ...]:
    """Return the findings that mean a hang, the worst first; replicas and data do not stop a job."""
    kinds = ("DD6", "DD506")
    return tuple(f for f in judgment.findings if f.severity is Severity.ERROR and f.code.startswith(kinds))
