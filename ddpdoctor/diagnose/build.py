"""Builds the report of a job from its run folder and the judgment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run.nodes import SavedRun, job_of, read_saved_run
from ddpdoctor.collect.run.source_lines import records_own_job
from ddpdoctor.diagnose.attempts import judge_earlier, last_attempt, last_number
from ddpdoctor.diagnose.loaders import loader_data
from ddpdoctor.diagnose.pictures.data import picture_data
from ddpdoctor.diagnose.progress import judge_job
from ddpdoctor.diagnose.reports import make_report
from ddpdoctor.diagnose.rows import pace_rows, rank_row
from ddpdoctor.diagnose.speed import speed_data
from ddpdoctor.model.codec import encode
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.facts import Job, Life, shell_status
from ddpdoctor.model.findings import JobStatus, JobSummary, Judgment, Severity, as_earlier, hangs, now
from ddpdoctor.model.run import JobEnd, Run
from ddpdoctor.rules.verdict import pick_verdict

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.consistency import Consistency
    from ddpdoctor.model.findings import Attempt, Finding, Report


def build_report(folder: Path, judgment: Judgment, end: JobEnd) -> Report:
    """Return the report of a job that was judged while it ran. Only the ``wrap`` that ran it calls this.

    Raises:
        UserError: the folder is no run folder.
    """
    saved = read_saved_run(folder)
    return _build(saved, job_of(saved), judgment, end, reads_source=True)


def rebuild_report(folder: Path) -> Report:
    """Return the report of a run folder without one: it was removed, the watcher was killed, or the disk was full.

    Raises:
        UserError: the folder is no run folder.
    """
    saved = read_saved_run(folder)
    job = job_of(saved)
    judgment = judge_job(job)
    return _build(saved, job, judgment, saved.own.end or _infer_end(saved.own.run, job, judgment))


def running_report(folder: Path, patience_s: float) -> Report:
    """Return the report of a job that goes on, from evidence that was just taken of it.

    A rank that made no progress for ``patience_s`` is blamed, if others wait for it.

    Raises:
        UserError: the folder is no run folder.
    """
    saved = read_saved_run(folder)
    job = job_of(saved)
    job = replace(job, hang_timeout_s=min(job.hang_timeout_s, patience_s))
    started_at = saved.own.run.started_at or now()
    end = JobEnd(hung=False, interrupted=False, exit_status=None, started_at=started_at, ended_at=now())
    pids = [rank.pid for rank in job.ranks if rank.pid is not None]
    own = records_own_job(folder, pids)
    return _build(saved, job, judge_job(job), end, JobStatus.RUNNING, reads_source=own)


def _infer_end(run: Run, job: Job, judgment: Judgment) -> JobEnd:
    """Infer how a job ended if its watcher did not record it. If the launcher still ran, it counts as interrupted."""
    status = job.launcher_status if job.ended else None
    hung = status is None and job.stopping_since_ns is not None and judgment.certain
    return JobEnd(
        hung=hung,
        interrupted=job.interrupted_by is not None or (status is None and not hung),
        exit_status=_infer_status(status, job.interrupted_by, hung=hung),
        started_at=run.started_at or now(),
        ended_at=now(),
    )


def _infer_status(status: int | None, interrupted_by: str | None, *, hung: bool) -> int | None:
    if interrupted_by == "SIGINT":
        return ExitStatus.INTERRUPTED
    if hung:
        return ExitStatus.HUNG
    return None if status is None else shell_status(status)


def _build(
    saved: SavedRun, job: Job, judgment: Judgment, end: JobEnd, status: JobStatus | None = None, *,
    reads_source: bool = False,
) -> Report:  # fmt: skip
    """Return the report of a job. Each attempt of a restarted job has its own section."""
    run = saved.own.run
    status = status or job_status(job, judgment, hung=end.hung, interrupted=end.interrupted)
    shown = tuple(finding for finding in judgment.findings if finding.code not in end.ignore)
    earlier = judge_earlier(saved, last_number(job), end.ignore)
    before = [finding for attempt in earlier for finding in as_earlier(attempt)]
    sections = (*earlier, last_attempt(run, job, status, shown)) if earlier else ()
    rows = tuple(rank_row(rank, job.stopping_since_ns if end.hung else None) for rank in job.ranks)
    summary = JobSummary(world_size=_world_size(job), nnodes=job.nnodes, status=status, exit_status=end.exit_status)
    drawn_as = JobStatus.HUNG if status is JobStatus.RUNNING and hangs(judgment) else status
    pictures = picture_data(job, saved, rows, pick_verdict(shown), drawn_as, reads_source=reads_source)
    return make_report(
        command=run.command or (),
        started_at=end.started_at,
        ended_at=end.ended_at,
        job=summary,
        findings=shown,
        earlier=before,
        checks=(*judgment.checks, *pictures.checks),
        ranks=rows,
        data=_data(run, job, sections, shown) | pictures.data,
    )


def job_status(job: Job, judgment: Judgment, *, hung: bool, interrupted: bool) -> JobStatus:
    """Return how the job ended. An abort at exit, after the script has finished, is not a failure of the job.

    ``hung`` is whether it was stopped. A job that goes on is running, whatever was found: a rank may move again.
    """
    if hung:
        return JobStatus.HUNG
    if interrupted:
        return JobStatus.INTERRUPTED
    if job.launcher_status == 0:
        return JobStatus.FINISHED
    if job.launcher_status is None and (not job.ended or any(rank.life is Life.RUNNING for rank in job.ranks)):
        return JobStatus.RUNNING
    only_at_exit = bool(judgment.findings) and all(f.severity is Severity.INFO for f in judgment.findings)
    if only_at_exit and any(f.kind == "exit-abort" for f in judgment.findings):
        return JobStatus.FINISHED
    return JobStatus.FAILED if job.ranks else JobStatus.NOT_RUN


def _world_size(job: Job) -> int | None:
    sizes = [rank.world_size for rank in job.ranks if rank.world_size]
    return max(sizes) if sizes else job.world_size


def _data(run: Run, job: Job, sections: tuple[Attempt, ...], findings: tuple[Finding, ...]) -> dict[str, Any]:
    return {
        "run": {
            "hang_timeout_s": run.hang_timeout_s,
            "torch_version": run.torch_version,
            "environment": run.environment,
            "debug_level": job.debug_level,
        },
        "attempts": last_number(job) + 1,
        "steps": pace_rows(job),
        "speed": speed_data(job, findings),
        "consistency": _without_values(job.consistency),
        "loaders": loader_data(job),
        "sections": [encode(section) for section in sections],
    }


def _without_values(consistency: Consistency | None) -> Any:
    """Encode the comparison without the ranks' values, which are in the run folder."""
    if consistency is None:
        return None
    return encode(replace(consistency, streams=tuple(replace(one, values=()) for one in consistency.streams)))
