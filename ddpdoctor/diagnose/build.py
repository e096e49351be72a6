"""Builds the report of a job from its run folder and what was judged of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import ddpdoctor
from ddpdoctor.collect.runfolder import read_job, read_run
from ddpdoctor.diagnose.paces import pace_rows
from ddpdoctor.diagnose.progress import judge_folder
from ddpdoctor.diagnose.rows import rank_row
from ddpdoctor.model.facts import Job, Life
from ddpdoctor.model.findings import Finding, JobStatus, JobSummary, Judgement, Report, Severity
from ddpdoctor.rules.verdict import order_findings, pick_verdict

if TYPE_CHECKING:
    from pathlib import Path


def build_report(  # noqa: PLR0913 - what a report says of a run, each under its name
    folder: Path,
    judgement: Judgement,
    *,
    hung: bool,
    exit_status: int | None,
    interrupted: bool,
    earlier: tuple[Judgement, ...] = (),
    ignore: tuple[str, ...] = (),
    started_at: str,
    ended_at: str,
) -> Report:
    """Return the report of a job. ``earlier`` are attempts that the launcher restarted; they are no verdict."""
    run = read_run(folder)
    job = read_job(folder)
    status = job_status(job, judgement, hung=hung, interrupted=interrupted)
    shown = [finding for finding in judgement.findings if finding.code not in ignore]
    before = [_as_earlier(finding, i) for i, past in enumerate(earlier) for finding in past.findings]
    return Report(
        command=tuple(run.get("command") or ()),
        started_at=started_at,
        ended_at=ended_at,
        job=JobSummary(world_size=_world_size(job), nnodes=job.nnodes, status=status, exit_status=exit_status),
        verdict=pick_verdict(shown),
        findings=tuple(order_findings([*shown, *(f for f in before if f.code not in ignore)])),
        checks=judgement.checks,
        ranks=tuple(rank_row(rank) for rank in job.ranks),
        data=_data(run, job),
        tool_version=ddpdoctor.__version__,
    )


def rebuild_report(folder: Path) -> Report:
    """Return the report of a run folder that has none: the watcher was killed, or the disk was full.

    Raises:
        UserError: the folder is no run folder.
    """
    run = read_run(folder)
    judgement = judge_folder(folder)
    started_at = str(run.get("started_at") or _now())
    return build_report(
        folder, judgement, hung=False, exit_status=None, interrupted=True, started_at=started_at, ended_at=_now()
    )


def job_status(job: Job, judgement: Judgement, *, hung: bool, interrupted: bool) -> JobStatus:
    """Return how the job ended. An abort at the exit of a script that had finished is no failure of the job."""
    if hung:
        return JobStatus.HUNG
    if interrupted:
        return JobStatus.INTERRUPTED
    if job.launcher_status == 0:
        return JobStatus.FINISHED
    if job.launcher_status is None and any(rank.life is Life.RUNNING for rank in job.ranks):
        return JobStatus.HUNG
    only_at_exit = bool(judgement.findings) and all(f.severity is Severity.INFO for f in judgement.findings)
    if only_at_exit and any(f.kind == "exit-abort" for f in judgement.findings):
        return JobStatus.FINISHED
    return JobStatus.FAILED if job.ranks else JobStatus.NOT_RUN


def _world_size(job: Job) -> int | None:
    told = [rank.world_size for rank in job.ranks if rank.world_size]
    return max(told) if told else job.world_size


def _as_earlier(finding: Finding, attempt: int) -> Finding:
    """Lower a finding: a failure that the launcher got over is a warning at most."""
    severity = Severity.WARNING if finding.severity is Severity.ERROR else finding.severity
    summary = f"attempt {attempt}, since restarted: {finding.summary}"
    return replace(finding, severity=severity, summary=summary)


def _data(run: dict[str, Any], job: Job) -> dict[str, Any]:
    names = ("hang_timeout_s", "debug_level", "torch_version", "environment")
    attempts = max((rank.attempt for rank in job.ranks), default=0) + 1
    return {"run": {name: run.get(name) for name in names}, "attempts": attempts, "steps": pace_rows(job)}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
