"""The metrics of a wrapped job, for monitoring systems. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

COMMON_LABELS = ("run", "host")
"""Labels that each sample has: the run folder, and the host of the rank or of the ``wrap`` that reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric. All are gauges, so that one text is valid for Prometheus and for OpenMetrics."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    """Labels beside the common ones."""
    unit: str = ""
    """As OpenTelemetry writes it (UCUM). The name ends with the unit's word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A value of a metric."""

    metric: Metric
    labels: tuple[tuple[str, str], ...]
    value: float


JOB_INFO = Metric(
    name="ddpdoctor_job_info",
    help="Always 1. The labels say what runs.",
    labels=("script", "version"),
)
JOB_STATUS = Metric(
    name="ddpdoctor_job_status",
    help="1 for the status of the job, 0 for the others.",
    labels=("status",),
)
JOB_EXIT_STATUS = Metric(name="ddpdoctor_job_exit_status", help="Exit status of wrap, once the job has ended.")
JOB_START_TIME = Metric(
    name="ddpdoctor_job_start_time_seconds",
    help="When the job started, in seconds since 1970.",
    unit="s",
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
    name="ddpdoctor_findings",
    help="Number of findings, once the job has ended.",
    labels=("code", "kind", "severity"),
)
RANK_UP = Metric(
    name="ddpdoctor_rank_up", help="1 if the process of the rank lives, 0 if it has ended.", labels=("rank",)
)
RANK_STEPS = Metric(
    name="ddpdoctor_rank_steps", help="Steps that the rank has made since its last start.", labels=("rank",)
)
RANK_STEP_TIME = Metric(
    name="ddpdoctor_rank_step_time_seconds",
    help="Time of a step, over the last steps.",
    labels=("rank",),
    unit="s",
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
    name="ddpdoctor_rank_memory_bytes",
    help="Resident memory of the process of the rank.",
    labels=("rank",),
    unit="By",
)
METRICS = (
    JOB_INFO,
    JOB_STATUS,
    JOB_EXIT_STATUS,
    JOB_START_TIME,
    JOB_RESTARTS,
    JOB_RANKS,
    REPLICAS_EQUAL_UP_TO,
    REPLICAS_COMPARED,
    REPLICAS_DIFFER,
    FINDINGS,
    RANK_UP,
    RANK_STEPS,
    RANK_STEP_TIME,
    RANK_WAITING,
    RANK_IDLE,
    RANK_EPOCHS,
    RANK_BATCHES,
    RANK_MEMORY,
)
