"""A job while it runs, its metrics, and the runs in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import JobStatus

if TYPE_CHECKING:
    from datetime import datetime

    from ddpdoctor.model.facts import NodeSeen
    from ddpdoctor.model.findings import Place


STATUS_FORMAT = "ddpdoctor-status"
STATUS_VERSION = 1


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
    # Resident memory of its process, without its children; None if that cannot be seen from here.
    memory_bytes: int | None


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
    # The ranks that keep the others waiting and wait for nobody themselves; empty if that is not known.
    waited_for: tuple[int, ...]
    replicas: ReplicasNow | None
    unseen: tuple[NodeSeen, ...]  # other members of the job whose ranks cannot be seen from here
    reported: str  # the verdict of a hang that `wrap` has reported while the job goes on; else empty


HISTORY_FORMAT = "ddpdoctor-history"
HISTORY_VERSION = 1
FAILURES = (JobStatus.FAILED, JobStatus.HUNG)


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
    # The step at which it last saved something with torch.save; None if it did not, or if that is not known.
    saved_step: int | None = None
    passes: tuple[PassSeen, ...] = ()  # the passes over the data of one rank, without a gap from the last one backwards
    first_epoch: int | None = None  # the epoch of its first pass, or None if the script gives its sampler no epochs
    hosts: int = 1
    code: str = ""  # the code of the verdict, such as DD605; empty if there is none
    kind: str = ""
    summary: str = ""  # the sentence of the verdict
    blamed: tuple[Blamed, ...] = ()  # each rank that the verdict blames with its host, or hosts; empty if it blames all

    @property
    def failed(self) -> bool:
        """Whether it ended with a failure. An interruption by a user or a scheduler is none."""
        return self.status in FAILURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the end of a start cost before the job went on."""

    steps: int | None  # steps that were made again, at most; None if that is not known
    # From the last progress to the first step of the next start; None if there is no next one, or it is not known.
    seconds: float | None


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
    costs: tuple[Cost, ...]  # one for each start
    failures: int
    span_s: float | None  # from the first start to the end of the last, or to now if it runs
    # The mean time between failures: the time in which it ran, divided by the failures. None without a failure.
    between_failures_s: float | None
    returning: tuple[Returning, ...]  # the most frequent first


# Labels that each sample has: the run folder, and the host of the rank or of the ``wrap`` that reports.
COMMON_LABELS = ("run", "host")


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


JOB_INFO = Metric(name="ddpdoctor_job_info", help="Always 1. The labels say what runs.", labels=("script", "version"))
JOB_STATUS = Metric(
    name="ddpdoctor_job_status", help="1 for the status of the job, 0 for the others.", labels=("status",)
)
JOB_EXIT_STATUS = Metric(name="ddpdoctor_job_exit_status", help="Exit status of wrap, once the job has ended.")
JOB_START_TIME = Metric(
    name="ddpdoctor_job_start_time_seconds", help="When the job started, in seconds since 1970.", unit="s"
)
JOB_RESTARTS = Metric(name="ddpdoctor_job_restarts", help="How often the launcher has restarted the ranks.")
JOB_RANKS = Metric(name="ddpdoctor_job_ranks", help="World size of the job.")
REPLICAS_EQUAL_UP_TO = Metric(
    name="ddpdoctor_replicas_equal_up_to_step",
    help="The last step at which all replicas were equal, 0 if they never were.",
)
REPLICAS_COMPARED = Metric(name="ddpdoctor_replicas_compared", help="How often the replicas were compared.")
REPLICAS_DIFFER = Metric(name="ddpdoctor_replicas_differ", help="1 if the replicas differ, 0 if they are equal.")
FINDINGS = Metric(
    name="ddpdoctor_findings", help="Number of findings, once the job has ended.", labels=("code", "kind", "severity")
)
RANK_UP = Metric(
    name="ddpdoctor_rank_up", help="1 if the process of the rank lives, 0 if it has ended.", labels=("rank",)
)
RANK_STEPS = Metric(
    name="ddpdoctor_rank_steps", help="Steps that the rank has made since its last start.", labels=("rank",)
)
RANK_STEP_TIME = Metric(
    name="ddpdoctor_rank_step_time_seconds", help="Time of a step, over the last steps.", labels=("rank",), unit="s"
)
RANK_WAITING = Metric(
    name="ddpdoctor_rank_waiting_ratio",
    help="Share of the last steps in which the rank waited for other ranks, 0 to 1.",
    labels=("rank",),
    unit="1",
)
RANK_IDLE = Metric(
    name="ddpdoctor_rank_idle_seconds",
    help="0 if the rank trains, else the time since it entered its current call or left its last one.",
    labels=("rank",),
    unit="s",
)
RANK_EPOCHS = Metric(
    name="ddpdoctor_rank_epochs", help="Passes over its data that the rank has begun.", labels=("rank",)
)
RANK_BATCHES = Metric(
    name="ddpdoctor_rank_batches", help="Batches that the rank has taken from its loader.", labels=("rank",)
)
RANK_MEMORY = Metric(
    name="ddpdoctor_rank_memory_bytes", help="Resident memory of the process of the rank.", labels=("rank",), unit="By"
)
METRICS = (
    JOB_INFO, JOB_STATUS, JOB_EXIT_STATUS, JOB_START_TIME, JOB_RESTARTS, JOB_RANKS, REPLICAS_EQUAL_UP_TO,
    REPLICAS_COMPARED, REPLICAS_DIFFER, FINDINGS, RANK_UP, RANK_STEPS, RANK_STEP_TIME, RANK_WAITING, RANK_IDLE,
    RANK_EPOCHS, RANK_BATCHES, RANK_MEMORY,
)  # fmt: skip
