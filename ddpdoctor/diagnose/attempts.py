"""Judges each earlier attempt of a restarted job from its records in the run folder."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.nodes import job_of
from ddpdoctor.collect.run.runfolder import JUDGED_ATTEMPTS
from ddpdoctor.diagnose.progress import judge_job
from ddpdoctor.diagnose.rows import rank_row
from ddpdoctor.model.findings import Attempt, Finding, JobStatus, Judgment, Severity
from ddpdoctor.rules.verdict import order_findings, pick_verdict

if TYPE_CHECKING:
    from ddpdoctor.collect.run.nodes import SavedRun
    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.run import Run


def judge_earlier(saved: SavedRun, last: int, ignore: tuple[str, ...]) -> tuple[Attempt, ...]:
    """Return the attempts before the last, up to a limit, without findings whose codes are in ``ignore``."""
    jobs = {number: job_of(saved, number) for number in range(max(0, last - JUDGED_ATTEMPTS), last)}
    return tuple(_restarted(number, job, judge_job(job), saved.own.run, ignore) for number, job in jobs.items())


def last_attempt(run: Run, job: Job, status: JobStatus, findings: tuple[Finding, ...]) -> Attempt:
    """Return the last attempt in the same form as the earlier ones."""
    return _section(last_number(job), job, status, findings, run)


def last_number(job: Job) -> int:
    """Return the number of the last attempt, counted from 0."""
    return max((rank.attempt for rank in job.ranks), default=0)


def _restarted(
    number: int, job: Job, judgment: Judgment, run: Run, ignore: tuple[str, ...]
) -> Attempt:  # fmt: skip
    findings = tuple(finding for finding in judgment.findings if finding.code not in ignore)
    failed = any(finding.severity is Severity.ERROR for finding in judgment.findings)
    return _section(number, job, JobStatus.FAILED if failed else JobStatus.INTERRUPTED, findings, run)


def _section(
    number: int, job: Job, status: JobStatus, findings: tuple[Finding, ...], run: Run
) -> Attempt:  # fmt: skip
    began = min((rank.started_ns for rank in job.ranks if rank.started_ns is not None), default=None)
    ended = max((rank.ended_ns for rank in job.ranks if rank.ended_ns is not None), default=None)
    return Attempt(
        attempt=number,
        started_at=wall_time(began, job, run),
        ended_at=wall_time(ended, job, run),
        seconds=round((ended - began) / 1e9, 3) if began is not None and ended is not None else None,
        status=status,
        verdict=pick_verdict(findings),
        findings=tuple(order_findings(findings)),
        ranks=tuple(rank_row(rank) for rank in job.ranks),
    )


def wall_time(time_ns: int | None, job: Job, run: Run) -> str | None:
    """Convert a monotonic time to wall-clock time, using the time of the launch."""
    try:
        launched = datetime.fromisoformat(run.started_at or "")
    except ValueError:
        return None
    if time_ns is None:
        return None
    return (launched + timedelta(microseconds=(time_ns - job.launched_ns) / 1000)).isoformat(timespec="milliseconds")
