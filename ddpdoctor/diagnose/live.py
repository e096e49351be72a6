"""Status and metrics of running and past jobs, and a summary of the reports in a folder."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.live import find_runs, read_live, with_past
from ddpdoctor.collect.run import job_of, read_saved_run
from ddpdoctor.diagnose.job import judge_earlier, last_number
from ddpdoctor.diagnose.pictures import describe_state
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.consistency import BEST_CLOCKS
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import Attempt, JobStatus
from ddpdoctor.model.live import (
    METRICS,
    Blamed,
    Cost,
    History,
    JobNow,
    Liveness,
    RankNow,
    ReplicasNow,
    Returning,
    Sample,
    Start,
    WaitNow,
)
from ddpdoctor.model.steps import recent_pace
from ddpdoctor.model.words import grouped
from ddpdoctor.recorder.storage.files import is_file
from ddpdoctor.rules.progress.job_state import build_job_state
from ddpdoctor.rules.progress.states import call_words, peer_words, to_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.collect.live import LiveRun
    from ddpdoctor.model.consistency import Consistency
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.findings import Report
    from ddpdoctor.rules.progress.job_state import JobState
    from ddpdoctor.rules.progress.states import RankState

    ReadReport = Callable[[Path], Report]

MOVES_S = 2.0
# A rank trains if it ended a step within this time, or within the time of this many steps. Our choice: of the last
# steps of a rank, the record may lack four.
MOVES_STEPS = 5
WAITS_S = 1.0  # our choice: shorter waits are a part of most steps


def read_status(run_dir: Path, *, with_others: bool = True) -> JobNow:
    return status_of(run_dir, read_live(run_dir, with_others=with_others), datetime.now(timezone.utc))


def status_of(run_dir: Path, live: LiveRun, now: datetime) -> JobNow:
    job, running_s, judged = live.job, None, None
    state = Liveness.RUNNING if live.is_running else Liveness.ENDED
    if live.is_running is None and live.end is None:
        state = Liveness.ELSEWHERE
    if state is not Liveness.ENDED:
        try:
            running_s = max(0.0, (now - datetime.fromisoformat(live.run.started_at or "")).total_seconds())
        except (ValueError, TypeError):
            running_s = None
        try:
            judged = build_job_state(job)
        except Exception:  # noqa: BLE001 - the wall around a rule: what else is known is shown without it
            judged = None
    # Who waits in what, the longest wait first
    waiting = []
    if judged is not None:
        for waiter in (judged.states[number] for number in judged.waits.waiters):
            if waiter.rank.life is Life.RUNNING and _waits_long(waiter, judged.time_ns):
                since_ns = waiter.since(judged.time_ns) or 0
                waiting.append((call_words(waiter.call) + peer_words(waiter.call), (waiter.rank.rank, since_ns)))
    waits = [
        WaitNow(ranks=tuple(n for n, _ in those), call=call, since_s=round(max(ns for _, ns in those) / 1e9, 3))
        for call, those in grouped(waiting).items()
    ]
    # The other members of which no rank was read
    seen = {rank.rank for rank in live.job.ranks}
    members = live.members.nodes if live.members is not None else ()
    own = live.members.own if live.members is not None else None
    return JobNow(
        run=str(run_dir),
        state=state,
        host=live.run.host,
        started_at=live.run.started_at,
        running_s=running_s,
        exit_status=live.end.exit_status if live.end is not None and state is Liveness.ENDED else None,
        attempt=max((rank.attempt for rank in job.ranks), default=0),
        world_size=max((rank.world_size for rank in job.ranks if rank.world_size), default=job.world_size),
        ranks=tuple(_rank_now(rank, live, judged) for rank in job.ranks),
        waits=tuple(sorted(waits, key=lambda row: -row.since_s)),
        waited_for=tuple(sorted({*judged.waits.blockers, *judged.waits.absent}))
        if judged is not None and waits
        else (),
        replicas=_replicas(live.replicas),
        unseen=tuple(
            member for member in members if member.number != own and not (member.ranks and seen >= set(member.ranks))
        ),
        reported="",
    )


def _rank_now(rank: Rank, live: LiveRun, judged: JobState | None) -> RankNow:
    now_ns = live.job.now_ns
    pace = recent_pace(rank.step_times) if rank.step_times is not None else None
    lives = rank.life is Life.RUNNING
    waiting = judged.states.get(rank.rank) if judged is not None else None
    is_at_it = lives and rank.proc_state is None and not _waits_long(waiting, now_ns)
    last_steps_ms = MOVES_STEPS * pace.step_ms if pace is not None else 0.0
    trains = is_at_it and pace is not None and now_ns - pace.ended_ns < max(MOVES_S * 1e9, last_steps_ms * 1e6)
    # How long it has been in its call, or if it is in none, since its last one ended
    since_ns = waiting.since(now_ns) if waiting is not None else None
    if since_ns is None:
        last = max((rank.started_ns or 0, *rank.recent_calls.ended_ns[-1:]))
        since_ns = now_ns - last if last else None
    # The user's line of its call, or else the last one that was seen
    site = waiting.call.site if waiting is not None and waiting.call is not None else None
    frame = site or rank.last_place
    return RankNow(
        rank=rank.rank,
        host=rank.host,
        pid=rank.pid,
        lives=lives,
        trains=trains,
        state="trains" if trains else describe_state(rank),
        since_s=None if trains or not lives or since_ns is None else round(max(0, since_ns) / 1e9, 3),
        where=None if trains or frame is None else to_place(rank.rank, frame),
        step=rank.steps or (pace.number if pace is not None else 0),
        step_ms=round(pace.step_ms, 3) if pace is not None else None,
        waits_share=round(pace.waits_share, 4) if pace is not None else None,
        epoch=rank.epochs,
        batch=rank.batches,
        memory_bytes=live.memory_bytes.get((rank.host, rank.pid or 0)) if lives else None,
    )


def _waits_long(state: RankState | None, now_ns: int) -> bool:
    return state is not None and state.waiting and (state.since(now_ns) or 0) > WAITS_S * 1e9


def _replicas(found: Consistency | None) -> ReplicasNow | None:
    streams = [stream for stream in found.streams if stream.compared and stream.model > 0] if found is not None else []
    if not streams:
        return None
    clock = next(clock for clock in BEST_CLOCKS if any(stream.clock is clock for stream in streams))
    those = [stream for stream in streams if stream.clock is clock]
    ends = [difference.last_equal for stream in those for difference in stream.differences]
    ends = ends or [stream.last_number for stream in those]
    equal_up_to = None if None in ends else min(filter(None, ends), default=None)
    differing = dict.fromkeys(difference.what.value for stream in those for difference in stream.differences)
    compared = sum(stream.compared for stream in those)
    return ReplicasNow(equal_up_to=equal_up_to, at=clock.value, compared=compared, differing=tuple(differing))


STATUSES = tuple(status for status in JobStatus if status is not JobStatus.NOT_RUN)


def read_samples(
    now: JobNow, report: Report | None, *, run: str, script: str, version: str, is_first: bool
) -> tuple[Sample, ...]:
    """Return samples; ``report`` is None while the job runs. Only the ``wrap`` that ``is_first`` reports on the job."""
    common = {"run": run, "host": now.host}
    rows: list[tuple[str, float | None, dict[str, str]]] = []
    if is_first:
        ended = report.job if report is not None else None
        status = ended.status if ended is not None else JobStatus.RUNNING
        started_s = datetime.fromisoformat(now.started_at).timestamp() if now.started_at else None
        rows = [
            ("job_info", 1, {**common, "script": script, "version": version}),
            *(("job_status", value is status, {**common, "status": value.value}) for value in STATUSES),
            ("job_exit_status", ended.exit_status if ended is not None else None, common),
            ("job_start_time_seconds", started_s, common),
            ("job_restarts", now.attempt, common),
            ("job_ranks", now.world_size, common),
        ]
        if now.replicas is not None:
            rows += [
                ("replicas_equal_up_to_step", now.replicas.equal_up_to or 0, common),
                ("replicas_compared", now.replicas.compared, common),
                ("replicas_differ", bool(now.replicas.differing), common),
            ]
        found = report.findings if report else ()
        counts = Counter((finding.code, finding.kind, finding.severity.value) for finding in found)
        for (code, kind, severity), count in counts.items():
            rows.append(("findings", count, {**common, "code": code, "kind": kind, "severity": severity}))
    for rank in now.ranks:
        labels = {**common, "host": rank.host, "rank": str(rank.rank)}
        values = {
            "rank_up": rank.lives,
            "rank_steps": rank.step,
            "rank_step_time_seconds": rank.step_ms / 1000 if rank.step_ms is not None else None,
            "rank_waiting_ratio": rank.waits_share,
            "rank_idle_seconds": 0 if rank.trains else rank.since_s,
            "rank_epochs": rank.epoch,
            "rank_batches": rank.batch,
            "rank_memory_bytes": rank.memory_bytes,
        }
        rows += [(name, value, labels) for name, value in values.items()]
    metrics = {metric.name.removeprefix("ddpdoctor_"): metric for metric in METRICS}
    known = ((metrics[name], labels, value) for name, value, labels in rows if value is not None)
    return tuple(Sample(metric=metric, labels=tuple(at.items()), value=value + 0) for metric, at, value in known)


def sum_up(command: tuple[str, ...], starts: Sequence[Start], now: datetime) -> History:
    failures = sum(start.failed for start in starts)
    began = [start.began_at for start in starts if start.began_at is not None]
    ended: list[datetime] = []
    ran_s = 0.0
    for start in starts:
        end = start.ended_at or start.last_progress_at or start.began_at
        end = now if start.status is JobStatus.RUNNING else end
        ended += [] if end is None else [end]
        if end is not None and start.began_at is not None:
            ran_s += max(0.0, (end - start.began_at).total_seconds())
    return History(
        command=command,
        starts=tuple(starts),
        costs=tuple(cost_of(starts, at) for at in range(len(starts))),
        failures=failures,
        span_s=(max(ended) - min(began)).total_seconds() if began and ended else None,
        between_failures_s=ran_s / failures if failures else None,
        returning=find_returning(starts),
    )


def cost_of(starts: Sequence[Start], at: int) -> Cost:
    """Return what the end of a start cost, or unknown if it finished, still runs or is the last."""
    start = starts[at]
    if at + 1 >= len(starts) or start.status in {JobStatus.FINISHED, JobStatus.RUNNING}:
        return Cost(steps=None, seconds=None)
    following = starts[at + 1]
    # The time from the last progress to the next first step. If the next start made no step, it ends with the
    # beginning of that: the rest is what the failure of that one costs.
    last = start.last_progress_at or start.began_at
    first = following.first_step_at or following.began_at
    lost_s = max(0.0, (first - last).total_seconds()) if last is not None and first is not None else None
    return Cost(steps=_lost_steps(start, following), seconds=lost_s)


def _lost_steps(start: Start, following: Start) -> int | None:
    """Return how many steps the next start repeated, at most: since the last save, else since its epoch began."""
    if start.saved_step is not None:
        return max(0, start.steps - start.saved_step)
    resumed, first = following.first_epoch, start.first_epoch
    if not start.steps:
        return 0
    if resumed is None and following.passes and first is not None:
        resumed = following.passes[0].epoch  # it made one pass with epoch 0, and the script does set epochs
    if resumed is None or not start.passes or (first is None and resumed == 0):
        return None
    if resumed < start.passes[0].epoch:
        return start.steps if first == start.passes[0].epoch else None
    return min(start.steps, sum(passed.steps for passed in start.passes if passed.epoch >= resumed))


def find_returning(starts: Iterable[Start]) -> tuple[Returning, ...]:
    """Return what two or more failures blame: a rank on a host, else a host, else a rank, as ranks may move."""
    failed = [start for start in starts if start.failed]
    several = any(start.hosts > 1 for start in failed)
    counts: list[Counter[Blamed]] = [Counter(), Counter(), Counter()]
    for start in failed:
        pairs = {blamed for blamed in start.blamed if blamed.rank is not None}
        counts[0].update(pairs)
        counts[1].update({Blamed(host=blamed.host) for blamed in start.blamed if blamed.host and several})
        counts[2].update({Blamed(rank=pair.rank) for pair in pairs})
    most = max((times for counter in counts for times in counter.values()), default=0)
    chosen = next((counter for counter in counts if most in counter.values()), Counter[Blamed]())
    rows = [Returning(who=who, times=times) for who, times in chosen.items() if times > 1]
    return tuple(sorted(rows, key=lambda row: (-row.times, row.who.host, row.who.rank or 0)))


RUN_MARK = "run.json"
HELP = "Give a folder with run folders of `ddpdoctor wrap`, or one of them; by default they are in ddpdoctor-report/."
# Options that differ between starts of one job.
VARIES = (
    "--report-dir", "--master-port", "--master-addr", "--exchange-port", "--rdzv-id", "--rdzv-endpoint", "--node-rank",
)  # fmt: skip


def read_histories(folder: Path, read_report: ReadReport) -> tuple[tuple[History, ...], tuple[str, ...]]:
    """Return the jobs in a folder, the latest last, and why others were not read. Raises ``UserError`` if none was."""
    if not folder.is_dir():
        raise UserError(f"folder not found: {folder}", help=HELP)
    runs: list[tuple[tuple[str, ...], tuple[Start, ...]]] = []
    unread = []
    for path in find_runs(folder):
        try:
            run = _read_starts(path, read_report)
        except UserError as error:
            unread.append(f"{path}: {error.message}")
            continue
        runs += [run] if run is not None else []
    if not runs:
        why = f": {unread[0]}" if unread else ""
        raise UserError(f"no readable run folder of a job in {folder}{why}", help=HELP)
    now = datetime.now(timezone.utc)
    jobs = []
    for of_job in grouped((job_key(command), (command, starts)) for command, starts in runs).values():
        every = sorted((start for _, starts in of_job for start in starts), key=_began)
        jobs.append(sum_up(of_job[-1][0], every, now))
    return tuple(sorted(jobs, key=lambda job: _began(job.starts[-1]))), tuple(unread)


def _began(start: Start) -> datetime:
    return start.began_at or datetime.min.replace(tzinfo=timezone.utc)


def job_key(command: Sequence[str]) -> tuple[str, ...]:
    """Return the common part of the command lines of all starts of one job."""
    words, key = iter(command), []
    for number, word in enumerate(words):
        name, is_attached, _ = word.replace("_", "-").partition("=")
        if name in VARIES:
            if not is_attached:
                next(words, None)
        else:
            key.append(Path(word).name if number == 0 else word)
    return tuple(key)


def _read_starts(path: Path, read_report: ReadReport) -> tuple[tuple[str, ...], tuple[Start, ...]] | None:
    """Return the command and the starts in a run folder, or None if the folder is not that of a job."""
    saved = read_saved_run(path) if is_file(path / RUN_MARK) else None
    if saved is not None and saved.own.end is None and read_live(path).is_running:
        # The last start of a job that runs is not judged.
        last = Attempt(
            attempt=last_number(job_of(saved)), started_at=None, ended_at=None, seconds=None, status=JobStatus.RUNNING,
            verdict=None, findings=(), ranks=(),
        )  # fmt: skip
        command, attempts = saved.own.run.command or (), [*judge_earlier(saved, last.attempt, ()), last]
    else:
        report = read_report(path)
        if report.job is None or "attempts" not in report.data:
            return None
        # A run that was not restarted is described by its report.
        whole = Attempt(
            attempt=0, started_at=report.started_at, ended_at=report.ended_at, seconds=None, status=report.job.status,
            verdict=report.verdict, findings=report.findings, ranks=report.ranks,
        )  # fmt: skip
        try:
            attempts = [decode(Attempt, section) for section in report.data.get("sections") or ()] or [whole]
        except (WrongValue, TypeError) as error:
            raise UserError(f"the attempts in the report cannot be read: {error}") from error
        command = report.command
    starts = []
    for attempt in attempts:
        start = _start(path, attempt)
        if saved is not None:
            with suppress(UserError):  # its records are gone or damaged
                launched = _parse_time(saved.own.run.started_at)
                start = with_past(start, saved, launched, is_last=attempt is attempts[-1])
        starts.append(start)
    return command, tuple(starts)


def _start(path: Path, attempt: Attempt) -> Start:
    verdict = attempt.verdict if attempt.status is not JobStatus.FINISHED else None
    # The ranks or hosts that a verdict blames, or none if it blames all of several ranks
    hosts = {row.rank: row.host for row in attempt.ranks}
    blamed: tuple[Blamed, ...] = ()
    if verdict is not None and verdict.ranks and not (len(verdict.ranks) == len(hosts) > 1):
        blamed = tuple(Blamed(rank=rank, host=hosts.get(rank, "")) for rank in verdict.ranks)
    elif verdict is not None and not verdict.ranks:
        blamed = tuple(Blamed(host=host) for host in verdict.hosts)
    return Start(
        run=str(path),
        attempt=attempt.attempt,
        status=attempt.status,
        began_at=_parse_time(attempt.started_at),
        first_step_at=None,
        last_progress_at=None,
        ended_at=_parse_time(attempt.ended_at),
        steps=max((row.step or 0 for row in attempt.ranks), default=0),
        hosts=len({row.host for row in attempt.ranks}),
        code=verdict.code if verdict is not None else "",
        kind=verdict.kind if verdict is not None else "",
        summary=verdict.summary if verdict is not None else "",
        blamed=blamed,
    )


def _parse_time(text: str | None) -> datetime | None:
    try:
        time = datetime.fromisoformat((text or "").replace("Z", "+00:00"))
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)
