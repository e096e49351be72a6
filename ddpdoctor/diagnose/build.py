"""Builds the report of a job from its run folder and what was judged of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.collect.run.runfolder import read_run
from ddpdoctor.diagnose.attempts import judge_earlier, last_attempt, last_number
from ddpdoctor.diagnose.paces import pace_rows
from ddpdoctor.diagnose.progress import judge_job
from ddpdoctor.diagnose.reports import make_report, now
from ddpdoctor.diagnose.rows import rank_row
from ddpdoctor.model.codec import encode
from ddpdoctor.model.facts import Job, Life, shell_status
from ddpdoctor.model.findings import JobStatus, JobSummary, Judgement, Severity, as_earlier

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.consistency import Consistency
    from ddpdoctor.model.findings import Attempt, Report


def build_report(  # noqa: PLR0913 - what a report says of a run, each under its name
    folder: Path,
    judgement: Judgement,
    *,
    hung: bool,
    exit_status: int | None,
    interrupted: bool,
    ignore: tuple[str, ...] = (),
    started_at: str,
    ended_at: str,
    job: Job | None = None,
) -> Report:
    """Return the report of a job. Attempts that the launcher restarted have sections of their own.

    ``job`` are the facts that the folder holds, where they were read already.
    """
    run = read_run(folder)
    job = read_job(folder) if job is None else job
    status = job_status(job, judgement, hung=hung, interrupted=interrupted)
    shown = tuple(finding for finding in judgement.findings if finding.code not in ignore)
    earlier = judge_earlier(folder, last_number(job), ignore)
    before = [finding for attempt in earlier for finding in as_earlier(attempt)]
    sections = (*earlier, last_attempt(folder, job, status, shown)) if earlier else ()
    return make_report(
        command=tuple(map(str, run.get("command") or ())),
        started_at=started_at,
        ended_at=ended_at,
        job=JobSummary(world_size=_world_size(job), nnodes=job.nnodes, status=status, exit_status=exit_status),
        findings=shown,
        earlier=before,
        checks=judgement.checks,
        ranks=(rank_row(rank, job.stopping_since_ns if hung else None) for rank in job.ranks),
        data=_data(run, job, sections),
    )


def rebuild_report(folder: Path) -> Report:
    """Return the report of a run folder that has none: the watcher was killed, or the disk was full.

    A job whose launcher had not ended when the folder was last written counts as interrupted.

    Raises:
        UserError: the folder is no run folder.
    """
    run = read_run(folder)
    job = read_job(folder)
    judgement = judge_job(job)
    status = job.launcher_status if job.ended else None
    hung = status is None and job.stopping_since_ns is not None and judgement.certain
    return build_report(
        folder,
        judgement,
        hung=hung,
        exit_status=shell_status(status) if status is not None else None,
        interrupted=job.interrupted_by is not None or (status is None and not hung),
        started_at=str(run.get("started_at") or now()),
        ended_at=now(),
        job=job,
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
    sizes = [rank.world_size for rank in job.ranks if rank.world_size]
    return max(sizes) if sizes else job.world_size


def _data(run: dict[str, Any], job: Job, sections: tuple[Attempt, ...]) -> dict[str, Any]:
    names = ("hang_timeout_s", "torch_version", "environment")
    return {
        "run": {name: run.get(name) for name in names} | {"debug_level": job.debug_level},
        "attempts": last_number(job) + 1,
        "steps": pace_rows(job),
        "consistency": _without_values(job.consistency),
        "sections": [encode(section) for section in sections],
    }


def _without_values(consistency: Consistency | None) -> Any:
    """Return what was compared and what differed; what ranks wrote beside it is in the run folder."""
    if consistency is None:
        return None
    return encode(replace(consistency, streams=tuple(replace(one, values=()) for one in consistency.streams)))
