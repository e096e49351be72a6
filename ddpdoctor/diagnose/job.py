"""The report of a job under `wrap`."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpdoctor.attach.find import named_file
from ddpdoctor.collect.live import is_watched, read_live
from ddpdoctor.collect.run import JUDGED_ATTEMPTS, SavedRun, job_of, job_of_node, read_job, read_saved_run
from ddpdoctor.collect.run_files import SOURCE_NAME, load_excerpt, read_excerpt, records_own_job, save
from ddpdoctor.diagnose import pictures as pic
from ddpdoctor.diagnose.report import attempt, make_report, reworded
from ddpdoctor.model.attached import Movement
from ddpdoctor.model.data import LoaderTaken, PassTaken, RankTaken
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.facts import Job, JobEnd, Life, Run, shell_status
from ddpdoctor.model.findings import (
    Attempt,
    Check,
    Finding,
    JobStatus,
    JobSummary,
    Judgment,
    Outcome,
    RankRow,
    Report,
    Severity,
    as_earlier,
    hangs,
    now,
)
from ddpdoctor.model.reading import Unread, Why, no_collection
from ddpdoctor.rules.data.shared import Replicas, replicas_of, shared_loaders
from ddpdoctor.rules.engine import judge, order_findings, pick_verdict
from ddpdoctor.rules.progress.job_state import Cause, JobState, build_job_state
from ddpdoctor.rules.progress.transport import find_targets
from ddpdoctor.rules.progress.wait_causes import is_limit_over
from ddpdoctor.rules.registry import rules_of
from ddpdoctor.rules.speed.comparing import network_use, settings_of
from ddpdoctor.rules.speed.gradients import overlap_of
from ddpdoctor.rules.speed.predictions import predict_changes
from ddpdoctor.rules.speed.reduction import curves_of
from ddpdoctor.rules.speed.state import SpeedState, build_speed_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ddpdoctor.model.attached import AttachedJob
    from ddpdoctor.model.pictures import SourceExcerpt
    from ddpdoctor.rules.bandwidth.curves import Baseline
    from ddpdoctor.rules.data.shared import Shared
    from ddpdoctor.rules.engine import Facts
    from ddpdoctor.rules.speed.reduction import MeasuredCurves

    # Asks the watcher that records in a folder for evidence, with a time limit, as long as it runs.
    Ask = Callable[[Path, float, Callable[[], bool]], bool]

MOST_LOADERS = 16  # our choice: a script with more makes them anew, and the first ones tell as much


def loader_data(job: Job) -> list[Any]:
    """Return the loaders that two or more ranks of a group trained with, paired as the data rules pair them."""
    try:
        found = replicas_of(job)
        known = [] if isinstance(found, Unread) else [replicas for replicas in found if replicas.by_model]
        loaders = [shared for replicas in known for shared in shared_loaders(replicas)]
        return list(map(_taken, loaders[:MOST_LOADERS]))
    except Exception:  # noqa: BLE001 - damaged records of one rank must not cost the report
        return []


def _taken(shared: Shared) -> LoaderTaken:
    site, passes = shared.first().site, shared.passes()
    taken = []
    for number in dict.fromkeys([*list(passes)[:1], *list(passes)[-1:]]):
        ranks = []
        for rank, epoch in passes[number].items():
            visible = shared.seen[rank].indices_seen
            drawn, order = (epoch.drawn, epoch.order if epoch.drawn else "") if visible else (None, "")
            ranks.append(RankTaken(rank=rank, batches=epoch.batches, drawn=drawn, order=order, complete=epoch.complete))
        taken.append(PassTaken(number=number, ranks=tuple(ranks)))
    file, line = ("", 0) if site is None else (site.file, site.line)
    return LoaderTaken(file=file, line=line, passes=tuple(taken))


CHECK_ID = "pictures"


# What a report gets: entries of its data, and a crashed check if they could not be made.
PictureData = tuple[dict[str, Any], tuple[Check, ...]]


def picture_data(
    job: Job,
    saved: SavedRun,
    rows: Iterable[RankRow],
    verdict: Finding | None,
    status: JobStatus,
    *,
    reads_source: bool,
) -> PictureData:
    """Return the data of the pictures. With ``reads_source``, the run folder keeps the user's lines at the verdict."""

    def make() -> dict[str, Any]:
        state = build_job_state(job) if status is not JobStatus.FINISHED else None
        cause = verdict if state is not None else None
        run, by_rank = saved.own.run, pic.rows_by_rank(rows)
        waiters = frozenset(state.waits.waiters if state is not None else ())
        started_at = pic.wall_time(pic.began_ns(job), job, run) or run.started_at or ""
        hung = status is JobStatus.HUNG
        timeline = pic.make_timeline(job, by_rank, cause, waiters=waiters, started_at=started_at, hung=hung)
        waits = pic.fold_waits(find_targets(state), by_rank, pic.blamed_ranks(cause)) if state is not None else None
        return {
            "timeline": timeline, "waits": waits, "source": _excerpt(saved, verdict, reads_source=reads_source),
        }  # fmt: skip

    return walled(make)


def walled(make: Callable[[], dict[str, Any]]) -> PictureData:
    made = attempt(make)
    if not isinstance(made, Exception):
        return made, ()
    return {}, (Check(id=CHECK_ID, outcome=Outcome.CRASHED, reason=f"{type(made).__name__}: {made}"),)


def _excerpt(saved: SavedRun, verdict: Finding | None, *, reads_source: bool) -> SourceExcerpt | None:
    """Return the lines around the first line that the verdict names: from the file, or else those that were kept."""
    place = next(iter(verdict.where), None) if verdict is not None else None
    if place is None:
        return None
    kept = load_excerpt(saved.own.path, place.file, place.line)
    # Other nodes send their records: a file is read only if the records of this host say that a rank here ran it.
    rows = (pic.rank_row(rank) for rank in job_of_node(saved.own).ranks) if reads_source else ()
    mark = f"{place.file}:"
    if not any(
        (row.where and row.where.file == place.file) or any(f.startswith(mark) for f in row.stack) for row in rows
    ):
        return kept
    try:
        began_s = datetime.fromisoformat(saved.own.run.started_at or "").timestamp()
    except ValueError:
        return kept
    found = read_excerpt(place.file, place.line, began_s)
    if found is None:
        return kept
    with suppress(OSError):  # a full disk loses it, and nothing else
        save(saved.own.path / SOURCE_NAME, found)
    return found


def speed_data(job: Job, findings: Iterable[Finding], curves: MeasuredCurves | None = None) -> dict[str, Any]:
    """Return the budget and the predictions. Without a budget, give the reason, and whether the user asked for it."""
    known: dict[str, Any]
    try:
        found = build_speed_state(job)
        if isinstance(found, Unread):
            known = {"reason": found.reason}
        else:
            known = {
                "budget": replace(found.budget, overlap=overlap_of(found)),
                "settings": settings_of(found),
                "network": network_use(found, curves),
                "predictions": list(predict_changes(found, findings, curves)),
            }
    except Exception as error:  # noqa: BLE001 - damaged records of one rank must not cost the report
        known = {"reason": f"{type(error).__name__}: {error}"}
    return {"asked": job.speed_asked, **known}


def predict_by_curve(report: Report, folder: Path, bench: Baseline) -> Report:
    """Predict by what ``allreduce-bench`` measured. Raises ``UserError`` without run, budget or float32 all-reduces."""
    curves = curves_of(bench.results, len(bench.members))
    if curves is None:
        raise UserError(
            f"--curve {bench.name} has too few float32 all-reduces",
            help="Run `ddpdoctor allreduce-bench --report-dir DIR` between the same hosts, and give DIR.",
        )
    speed = speed_data(read_job(folder), report.findings, curves)
    if "budget" not in speed:
        raise UserError(
            f"{folder} has no time budget: {speed['reason']}",
            help="Give the folder of a run of `ddpdoctor wrap --speed`.",
        )
    return replace(report, data={**report.data, "speed": {**speed, "asked": True}})


LIMIT_S = 20.0  # our choice: ranks answer within three seconds, and other nodes within five
# Our choice: who asks suspects a hang, so a rank without progress is blamed sooner than by a watcher that may stop the
# job.
PATIENCE_S = 10.0


def take_dump(run_dir: Path, ask: Ask) -> Report:
    """Take evidence of the job in a run folder, and return its report. Raises ``UserError`` if none can be taken."""
    live = read_live(run_dir)
    if live.is_running is None:
        raise UserError(
            f"the job was started on {live.run.host}, and its `wrap` cannot be reached from here",
            help=f"Run the command on {live.run.host}.",
        )
    is_running, came = partial(is_watched, live.run), False
    try:
        came = live.is_running and ask(live.folder, LIMIT_S, is_running)
    except OSError as error:
        raise UserError(f"the `wrap` of {run_dir} cannot be reached: {error.strerror}") from error
    if not live.is_running or (not came and not is_running()):
        raise UserError(f"the job in {run_dir} has ended", help=f"`ddpdoctor report {run_dir}` shows the result.")
    if not came:
        raise UserError(
            f"the `wrap` of {run_dir} did not answer within {LIMIT_S:.0f} s",
            help="It may be stopped, or an older version. `ddpdoctor attach` inspects the ranks without it.",
            status=ExitStatus.INCONCLUSIVE,
        )
    return running_report(live.folder, PATIENCE_S)


def judge_earlier(saved: SavedRun, last: int, ignore: tuple[str, ...]) -> tuple[Attempt, ...]:
    """Return the attempts before the last, up to a limit, without findings whose codes are in ``ignore``."""
    attempts = []
    for number in range(max(0, last - JUDGED_ATTEMPTS), last):
        job = job_of(saved, number)
        found = judge_job(job).findings
        failed = any(finding.severity is Severity.ERROR for finding in found)
        status = JobStatus.FAILED if failed else JobStatus.INTERRUPTED
        shown = tuple(finding for finding in found if finding.code not in ignore)
        attempts.append(_section(number, job, status, shown, saved.own.run))
    return tuple(attempts)


def last_number(job: Job) -> int:
    """Return the number of the last attempt, counted from 0."""
    return max((rank.attempt for rank in job.ranks), default=0)


def _section(number: int, job: Job, status: JobStatus, findings: tuple[Finding, ...], run: Run) -> Attempt:
    began = min((rank.started_ns for rank in job.ranks if rank.started_ns is not None), default=None)
    ended = max((rank.ended_ns for rank in job.ranks if rank.ended_ns is not None), default=None)
    return Attempt(
        attempt=number,
        started_at=pic.wall_time(began, job, run),
        ended_at=pic.wall_time(ended, job, run),
        seconds=round((ended - began) / 1e9, 3) if began is not None and ended is not None else None,
        status=status,
        verdict=pick_verdict(findings),
        findings=tuple(order_findings(findings)),
        ranks=tuple(pic.rank_row(rank) for rank in job.ranks),
    )


HANG_OPTION = "--hang-timeout"
# Options of ``wrap`` that rules name and that other ways in do not have.
_WRAP_ONLY = re.compile(r"--(?:allow-different|check-every|debug-level|on-hang|speed|no-consistency)\b")


def judge_folder(folder: Path, attempt: int | None = None) -> Judgment:
    """Judge an attempt, by default the last. An unreadable folder becomes a crashed check; the job continues."""
    with no_collection():
        try:
            job = read_job(folder, attempt)
        except UserError as error:
            check = Check(id="run-folder", outcome=Outcome.CRASHED, reason=error.message)
            return Judgment(findings=(), checks=(check,), certain=False)
        return judge_job(job)


def judge_replicas(folder: Path) -> tuple[Finding, ...]:
    try:
        return judge(rules_of("consistency"), {Job: [read_job(folder)]}).findings
    except UserError:
        return ()


def judge_job(job: Job) -> Judgment:
    """Judge a job with all rules about progress, replicas and data, and about speed if the user asked for it."""
    rules = rules_of("progress", "consistency", "data", *["speed"] if job.speed_asked else [])
    state = attempt(lambda: build_job_state(job))
    states = state if isinstance(state, Exception) else [state]
    facts: Facts = {JobState: states, Job: [job], Replicas: attempt(lambda: replicas_of(job))}
    if job.speed_asked:
        speed: SpeedState | Unread | Exception
        if isinstance(state, JobState) and state.cause is not Cause.NONE:  # such a job has other trouble first
            speed = Unread(why=Why.NEEDLESS, reason=state.cause.value)
        else:
            speed = attempt(lambda: build_speed_state(job))
        facts = {**facts, SpeedState: [speed] if isinstance(speed, SpeedState) else speed}
    judged = judge(rules, facts)
    # A hang past torch's own time limit is final, because torch ends the job.
    over = judged.certain and not isinstance(state, Exception) and is_limit_over(state)
    judged = replace(judged, proven=judged.proven or over)
    return judged if job.entry == "wrap" else in_words_of(job.entry, judged)


def in_words_of(entry: str, judged: Judgment) -> Judgment:
    """Return a judgment that names settings as the user gave them. Rules name them as the options of ``wrap``."""

    def words(text: str) -> str:
        if entry == "pytest":
            return text.replace(HANG_OPTION, "--ddpdoctor-timeout")
        return text.replace(HANG_OPTION, f"hang_timeout of {entry}", 1).replace(HANG_OPTION, "hang_timeout")

    def advice(text: str) -> str:
        others = list(dict.fromkeys(_WRAP_ONLY.findall(text)))
        is_are = "is an option" if len(others) == 1 else "are options"
        return f"{words(text)} ({' and '.join(others)} {is_are} of `ddpdoctor wrap`)" if others else words(text)

    findings = tuple(reworded(finding, words, advice) for finding in judged.findings)
    checks = tuple(replace(check, reason=words(check.reason)) for check in judged.checks)
    return replace(judged, findings=findings, checks=checks)


def build_report(folder: Path, judgment: Judgment, end: JobEnd) -> Report:
    """Return the report of a job that was judged while it ran. Only the ``wrap`` that ran it calls this."""
    saved = read_saved_run(folder)
    return _build_report(saved, job_of(saved), judgment, end, reads_source=True)


def rebuild_report(folder: Path) -> Report:
    """Return the report of a run folder without one: it was removed, the watcher was killed, or the disk was full."""
    saved = read_saved_run(folder)
    job = job_of(saved)
    judgment = judge_job(job)
    if (end := saved.own.end) is None:
        # Infer how it ended. If the launcher still ran, it counts as interrupted.
        status = job.launcher_status if job.ended else None
        hung = status is None and job.stopping_since_ns is not None and judgment.certain
        if job.interrupted_by == "SIGINT":
            status_of_job: int | None = ExitStatus.INTERRUPTED
        elif hung:
            status_of_job = ExitStatus.HUNG
        else:
            status_of_job = None if status is None else shell_status(status)
        was_cut = job.interrupted_by is not None or (status is None and not hung)
        began = saved.own.run.started_at or now()
        end = JobEnd(hung=hung, interrupted=was_cut, exit_status=status_of_job, started_at=began, ended_at=now())
    return _build_report(saved, job, judgment, end)


def running_report(folder: Path, patience_s: float) -> Report:
    """Report a running job from fresh evidence; a rank without progress for ``patience_s`` may be blamed."""
    saved = read_saved_run(folder)
    job = job_of(saved)
    job = replace(job, hang_timeout_s=min(job.hang_timeout_s, patience_s))
    started_at = saved.own.run.started_at or now()
    end = JobEnd(hung=False, interrupted=False, exit_status=None, started_at=started_at, ended_at=now())
    pids = [rank.pid for rank in job.ranks if rank.pid is not None]
    own = records_own_job(folder, pids)
    return _build_report(saved, job, judge_job(job), end, JobStatus.RUNNING, reads_source=own)


def _build_report(
    saved: SavedRun, job: Job, judgment: Judgment, end: JobEnd, status: JobStatus | None = None, *,
    reads_source: bool = False,
) -> Report:  # fmt: skip
    run = saved.own.run
    status = status or job_status(job, judgment, hung=end.hung, interrupted=end.interrupted)
    shown = tuple(finding for finding in judgment.findings if finding.code not in end.ignore)
    last = last_number(job)
    earlier = judge_earlier(saved, last, end.ignore)
    before = [finding for attempt in earlier for finding in as_earlier(attempt)]
    sections = (*earlier, _section(last, job, status, shown, run)) if earlier else ()
    rows = tuple(pic.rank_row(rank, job.stopping_since_ns if end.hung else None) for rank in job.ranks)
    world_size = max((rank.world_size for rank in job.ranks if rank.world_size), default=job.world_size)
    summary = JobSummary(world_size=world_size, nnodes=job.nnodes, status=status, exit_status=end.exit_status)
    drawn_as = JobStatus.HUNG if status is JobStatus.RUNNING and hangs(judgment) else status
    pictures, failed = picture_data(job, saved, rows, pick_verdict(shown), drawn_as, reads_source=reads_source)
    consistency = job.consistency
    if consistency is not None:  # without the ranks' values, which are in the run folder
        consistency = replace(consistency, streams=tuple(replace(stream, values=()) for stream in consistency.streams))
    data = {
        "run": {
            "hang_timeout_s": run.hang_timeout_s,
            "torch_version": run.torch_version,
            "backend": job.backend,
            "environment": run.environment,
            "debug_level": job.debug_level,
        },
        "attempts": last + 1,
        "steps": pic.pace_rows(job),
        "speed": speed_data(job, shown),
        "consistency": consistency,
        "loaders": loader_data(job),
        "sections": list(sections),
    }
    return make_report(
        command=run.command or (),
        started_at=end.started_at,
        ended_at=end.ended_at,
        job=summary,
        findings=shown,
        earlier=before,
        checks=(*judgment.checks, *failed),
        ranks=rows,
        data=data | pictures,
    )


def job_status(job: Job, judgment: Judgment, *, hung: bool, interrupted: bool) -> JobStatus:
    """Return how the job ended. An abort at exit does not count as a failure; a job that continues is running."""
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


NOTE = "the verdict comes from the records of the `ddpdoctor wrap` that runs the job"


def use_own_records(report: Report, seen: AttachedJob) -> Report:
    """Return a report of `attach` on this host with the verdict of the job's own run folder, if that has one."""
    folders = {rank.wrap_folder: rank.pid for rank in seen.ranks}
    folder, pid = next(iter(folders.items()))
    if folder is None or len(folders) > 1 or seen.movement is Movement.MOVING:
        return report
    try:
        path = named_file(pid, folder)
        saved = read_saved_run(path)
        job = job_of(saved)
    except UserError:
        return report  # the folder is gone
    # The job as one that runs now, in which a rank stands still if two looks saw that, however short that is
    now_ns = time.monotonic_ns()
    still_ns = now_ns - int(seen.gap_s * 1e9)
    last_ns = {moved.rank: still_ns if moved.movement is Movement.STILL else now_ns for moved in seen.movements}
    ranks = tuple(
        replace(rank, last_progress_ns=last_ns.get(rank.rank, rank.last_progress_ns))
        if rank.life is Life.RUNNING
        else rank
        for rank in job.ranks
    )
    job = replace(job, ended=False, now_ns=now_ns, hang_timeout_s=min(job.hang_timeout_s, seen.gap_s), ranks=ranks)
    # Until `wrap` has asked the ranks, they are not.
    if not all(len(rank.groups) <= 1 or all(group.ranks for group in rank.groups) for rank in job.ranks):
        return report
    judged = judge_job(job)
    verdict = pick_verdict(judged.findings)
    if verdict is None:
        return report
    about = report.data["evidence"]
    rows = tuple(pic.rank_row(rank) for rank in job.ranks)
    own = records_own_job(path, [rank.pid for rank in seen.ranks])
    pictures, failed = picture_data(job, saved, rows, verdict, JobStatus.HUNG, reads_source=own)
    findings, checks = tuple(order_findings(judged.findings)), (*judged.checks, *failed)
    data = {**report.data, **pictures, "evidence": {**about, "notes": [*about["notes"], NOTE]}}
    return replace(report, verdict=verdict, findings=findings, checks=checks, ranks=rows, data=data)
