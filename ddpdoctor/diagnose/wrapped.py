"""Judges a job that `attach` looked at by the records of `wrap`, if it runs under that: they know its calls."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.attach.find import named_file
from ddpdoctor.collect.run.nodes import job_of, read_saved_run
from ddpdoctor.collect.run.source_lines import records_own_job
from ddpdoctor.diagnose.pictures.data import picture_data
from ddpdoctor.diagnose.progress import judge_job
from ddpdoctor.diagnose.rows import rank_row
from ddpdoctor.model.attached import Movement
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import JobStatus
from ddpdoctor.rules.verdict import order_findings, pick_verdict

if TYPE_CHECKING:
    from ddpdoctor.model.attached import AttachedJob
    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Report

NOTE = "the verdict is from the records of `ddpdoctor wrap`, which runs the job"


def use_own_records(report: Report, seen: AttachedJob) -> Report:
    """Return a report of `attach` on this host with the verdict of the job's own run folder, if that has one."""
    folders = {rank.wrap_folder: rank.pid for rank in seen.ranks}
    folder, pid = next(iter(folders.items()))
    if folder is None or len(folders) > 1 or seen.movement is Movement.MOVING:
        return report
    try:
        path = named_file(pid, folder)
        saved = read_saved_run(path)
        job = _as_seen(job_of(saved), seen)
    except UserError:
        return report  # the folder is gone
    if not _knows_groups(job):
        return report
    judged = judge_job(job)
    verdict = pick_verdict(judged.findings)
    if verdict is None:
        return report
    about = report.data["evidence"]
    rows = tuple(rank_row(rank) for rank in job.ranks)
    own = records_own_job(path, [rank.pid for rank in seen.ranks])
    pictures = picture_data(job, saved, rows, verdict, JobStatus.HUNG, reads_source=own)
    return replace(
        report,
        verdict=verdict,
        findings=tuple(order_findings(judged.findings)),
        checks=(*judged.checks, *pictures.checks),
        ranks=rows,
        data={**report.data, **pictures.data, "evidence": {**about, "notes": [*about["notes"], NOTE]}},
    )


def _knows_groups(job: Job) -> bool:
    """Return whether the members of all groups are known. Until `wrap` has asked the ranks, they are not."""
    return all(len(rank.groups) <= 1 or all(group.ranks for group in rank.groups) for rank in job.ranks)


def _as_seen(job: Job, seen: AttachedJob) -> Job:
    """Return a job as one that runs now, in which a rank stands still if two looks saw that, however short that is."""
    now_ns = time.monotonic_ns()
    last_ns = {
        one.rank: now_ns - int(seen.gap_s * 1e9) if one.movement is Movement.STILL else now_ns for one in seen.movements
    }
    return replace(
        job,
        ended=False,
        now_ns=now_ns,
        hang_timeout_s=min(job.hang_timeout_s, seen.gap_s),
        ranks=tuple(
            replace(rank, last_progress_ns=last_ns.get(rank.rank, rank.last_progress_ns))
            if rank.life is Life.RUNNING
            else rank
            for rank in job.ranks
        ),
    )
