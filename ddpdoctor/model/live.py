"""A job while it runs, its metrics, and the runs in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import JobStatus, Place

if TYPE_CHECKING:
    from datetime import datetime

    from ddpdoctor.model.facts import NodeSeen

STATUS_FORMAT = "ddpdoctor-status"
STATUS_VERSION = 1
HISTORY_FORMAT = "ddpdoctor-history"
HISTORY_VERSION = 1
FAILURES = (JobStatus.FAILED, JobStatus.HUNG)
# Labels that each sample has: the run folder, and the host of the rank or of the ``wrap`` that reports.
COMMON_LABELS = ("run", "host")


class Liveness(str, Enum):
    """Whether a job runs."""

    RUNNING = "running"
    ENDED = "ended"
    ELSEWHERE = "elsewhere"  # `wrap` was started on another host, whose processes cannot be seen from here


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNow:
    """One rank. Counts are those since its start."""

    rank: int
    host: str
    pid: int | None
    lives: bool
    trains: bool  # it ended a step recently
    state: str  # one phrase: "trains", "in all_reduce", "frozen", "exit status 1"
    since_s: float | None  # how long it has been in this state; None if it trains, or if that is not known
    where: Place | None  # the user's line at which it was seen last, if it does not train
    step: int
    step_ms: float | None  # milliseconds a step over the last steps
    waits_share: float | None  # the share of these steps in which it waited for other ranks
    epoch: int  # passes over its data that it has begun
    batch: int  # the number of its last batch, over all passes
    memory_bytes: int | None  # resident, without its children; None: not seen from here


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitNow:
    """Ranks that wait in calls of one kind."""

    ranks: tuple[int, ...]
    call: str  # what they wait in: "all_reduce of float32[1]"
    since_s: float  # how long the first of them has waited


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasNow:
    """The comparison of the replicas so far."""

    equal_up_to: int | None  # the number of the last point at which all were equal; None if they never were
    at: str  # what is counted: "optimizer step"
    compared: int  # how often they were compared
    differing: tuple[str, ...] = ()  # the kinds of tensors that differ since then: "parameter"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNow:
    """A wrapped job at one point in time."""

    run: str  # its run folder
    state: Liveness
    host: str  # the host of the `wrap` that reports
    started_at: str | None  # ISO 8601, UTC
    running_s: float | None
    exit_status: int | None  # the exit status of `wrap`, once the job has ended
    attempt: int  # counted from 0: how often the launcher has restarted the ranks
    world_size: int | None
    ranks: tuple[RankNow, ...]
    waits: tuple[WaitNow, ...]  # waits that are longer than a second
    waited_for: tuple[int, ...]  # those that the others wait for and that wait for no rank; empty: not known
    replicas: ReplicasNow | None
    unseen: tuple[NodeSeen, ...]  # other members of the job whose ranks cannot be seen from here
    reported: str  # the verdict of a hang that `wrap` has reported while the job goes on; else empty


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeen:
    """One pass over the data of a rank."""

    epoch: int  # the epoch that the script gave to its sampler
    steps: int  # optimizer steps in this pass, estimated from the batches that a backward followed


@dataclass(frozen=True, slots=True, kw_only=True)
class Blamed:
    """A rank, a host, or a rank on a host."""

    rank: int | None = None
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a job. Times are None if they are not known."""

    run: str  # the run folder
    attempt: int  # counted from 0 within the run folder
    status: JobStatus
    began_at: datetime | None
    first_step_at: datetime | None  # when its first step ended; None if it made none
    last_progress_at: datetime | None  # when its last step ended
    ended_at: datetime | None  # None if it still runs
    steps: int  # the last step that a rank reached, counted from this start
    saved_step: int | None = None  # the step at which it last saved something with torch.save, if known
    passes: tuple[PassSeen, ...] = ()  # the passes over the data of one rank, without a gap from the last one backwards
    first_epoch: int | None = None  # the epoch of its first pass, or None if the script gives its sampler no epochs
    hosts: int = 1
    code: str = ""  # the code of the verdict, such as DD605; empty if there is none
    kind: str = ""
    summary: str = ""  # the sentence of the verdict
    blamed: tuple[Blamed, ...] = ()  # each rank that the verdict blames with its host, or hosts; empty if it blames all

    @property
    def failed(self) -> bool:
        """Whether it ended with a failure. An interruption by a user or a scheduler is not a failure."""
        return self.status in FAILURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the end of a start cost before the job went on."""

    steps: int | None  # steps that were made again, at most; None if that is not known
    seconds: float | None  # from the last progress to the first step of the next start, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """A rank or host that several verdicts blame."""

    who: Blamed
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All starts of one job, the first one first."""

    command: tuple[str, ...]
    starts: tuple[Start, ...]
    costs: tuple[Cost, ...]  # one for each start
    failures: int
    span_s: float | None  # from the first start to the end of the last, or to now if it runs
    between_failures_s: float | None  # the time in which it ran, divided by the failures; None without a failure
    returning: tuple[Returning, ...]  # the most frequent first


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric. All are gauges, so that one text is valid for Prometheus and for OpenMetrics."""

    name: str
    help: str
    labels: tuple[str, ...] = ()  # labels beside the common ones
    unit: str = ""  # As OpenTelemetry writes it (UCUM). The name ends with the unit's word.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A value of a metric."""

    metric: Metric
    labels: tuple[tuple[str, str], ...]
    value: float


METRICS = tuple(
    Metric(name=f"ddpdoctor_{name}", help=text, labels=tuple(labels.split()), unit=unit)
    for name, text, labels, unit in (
        ("job_info", "Always 1. The labels describe the job.", "script version", ""),
        ("job_status", "1 for the status of the job, 0 for the others.", "status", ""),
        ("job_exit_status", "Exit status of wrap, once the job has ended.", "", ""),
        ("job_start_time_seconds", "When the job started, in seconds since 1970.", "", "s"),
        ("job_restarts", "How often the launcher has restarted the ranks.", "", ""),
        ("job_ranks", "World size of the job.", "", ""),
        ("replicas_equal_up_to_step", "The last step at which all replicas were equal, 0 if they never were.", "", ""),
        ("replicas_compared", "How often the replicas were compared.", "", ""),
        ("replicas_differ", "1 if the replicas differ, 0 if they are equal.", "", ""),
        ("findings", "Number of findings, once the job has ended.", "code kind severity", ""),
        ("rank_up", "1 if the process of the rank lives, 0 if it has ended.", "rank", ""),
        ("rank_steps", "Steps that the rank has made since its last start.", "rank", ""),
        ("rank_step_time_seconds", "Time of a step, over the last steps.", "rank", "s"),
        (
            "rank_waiting_ratio",
            "Share of the last steps in which the rank waited for other ranks, 0 to 1.",
            "rank",
            "1",
        ),
        (
            "rank_idle_seconds",
            "0 if the rank trains, else the time since it entered its current call or left its last one.",
            "rank",
            "s",
        ),
        ("rank_epochs", "Passes over its data that the rank has begun.", "rank", ""),
        ("rank_batches", "Batches that the rank has taken from its loader.", "rank", ""),
        ("rank_memory_bytes", "Resident memory of the process of the rank.", "rank", "By"),
    )
)
