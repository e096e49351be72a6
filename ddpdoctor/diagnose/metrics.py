"""Turns the status of a wrapped job, and at its end its report, into samples of metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ddpdoctor.model import metrics
from ddpdoctor.model.findings import JobStatus
from ddpdoctor.model.metrics import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.metrics import Metric
    from ddpdoctor.model.status import JobNow, RankNow, ReplicasNow

STATUSES = tuple(status for status in JobStatus if status is not JobStatus.NOT_RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLabels:
    """Whose metrics they are."""

    run: str
    script: str
    version: str
    is_first: bool
    """Whether this ``wrap`` reports of the whole job. Others report of their ranks only: no sample is double."""


def read_samples(now: JobNow, report: Report | None, measured: JobLabels) -> tuple[Sample, ...]:
    """Return all samples. ``report`` is that of the job's end, or None while it runs."""
    common = {"run": measured.run, "host": now.host}
    found = list(_of_job(now, report, measured, common)) if measured.is_first else []
    for rank in now.ranks:
        labels = {**common, "host": rank.host, "rank": str(rank.rank)}
        found += [_sample(metric, value, labels) for metric, value in _of_rank(rank) if value is not None]
    return tuple(found)


def _of_job(now: JobNow, report: Report | None, measured: JobLabels, common: dict[str, str]) -> Iterator[Sample]:
    yield _sample(metrics.JOB_INFO, 1, common, script=measured.script, version=measured.version)
    ended = report.job if report is not None else None
    status = ended.status if ended is not None else JobStatus.RUNNING
    for one in STATUSES:
        yield _sample(metrics.JOB_STATUS, one is status, common, status=one.value)
    if ended is not None and ended.exit_status is not None:
        yield _sample(metrics.JOB_EXIT_STATUS, ended.exit_status, common)
    if now.started_at:
        yield _sample(metrics.JOB_START_TIME, datetime.fromisoformat(now.started_at).timestamp(), common)
    yield _sample(metrics.JOB_RESTARTS, now.attempt, common)
    if now.world_size is not None:
        yield _sample(metrics.JOB_RANKS, now.world_size, common)
    if now.replicas is not None:
        yield from _of_replicas(now.replicas, common)
    if report is not None:
        yield from _of_findings(report, common)


def _of_replicas(replicas: ReplicasNow, common: dict[str, str]) -> Iterator[Sample]:
    yield _sample(metrics.REPLICAS_EQUAL_UP_TO, replicas.equal_up_to or 0, common)
    yield _sample(metrics.REPLICAS_COMPARED, replicas.compared, common)
    yield _sample(metrics.REPLICAS_DIFFER, bool(replicas.differing), common)


def _of_findings(report: Report, common: dict[str, str]) -> Iterator[Sample]:
    counts = Counter((one.code, one.kind, one.severity.value) for one in report.findings)
    for (code, kind, severity), count in counts.items():
        yield _sample(metrics.FINDINGS, count, common, code=code, kind=kind, severity=severity)


def _of_rank(rank: RankNow) -> Iterator[tuple[Metric, float | None]]:
    yield metrics.RANK_UP, rank.lives
    yield metrics.RANK_STEPS, rank.step
    yield metrics.RANK_STEP_TIME, rank.step_ms / 1000 if rank.step_ms is not None else None
    yield metrics.RANK_WAITING, rank.waits_share
    yield metrics.RANK_IDLE, 0 if rank.trains else rank.since_s
    yield metrics.RANK_EPOCHS, rank.epoch
    yield metrics.RANK_BATCHES, rank.batch
    yield metrics.RANK_MEMORY, rank.memory_bytes


def _sample(metric: Metric, value: float, common: dict[str, str], /, **labels: str) -> Sample:
    return Sample(metric=metric, labels=tuple({**common, **labels}.items()), value=value + 0)
