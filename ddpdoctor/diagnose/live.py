"""A job while it runs: its status, its metrics, and what loggers get."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ddpdoctor.collect.live import read_live
from ddpdoctor.collect.run import read_loggers
from ddpdoctor.diagnose.pictures import describe_state
from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.consistency import StreamClock
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import JobStatus, Place
from ddpdoctor.model.live import (
    FINDINGS,
    JOB_EXIT_STATUS,
    JOB_INFO,
    JOB_RANKS,
    JOB_RESTARTS,
    JOB_START_TIME,
    JOB_STATUS,
    RANK_BATCHES,
    RANK_EPOCHS,
    RANK_IDLE,
    RANK_MEMORY,
    RANK_STEP_TIME,
    RANK_STEPS,
    RANK_UP,
    RANK_WAITING,
    REPLICAS_COMPARED,
    REPLICAS_DIFFER,
    REPLICAS_EQUAL_UP_TO,
    JobNow,
    Liveness,
    RankNow,
    ReplicasNow,
    Sample,
    WaitNow,
)
from ddpdoctor.model.steps import recent_pace
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.progress.job_state import build_job_state
from ddpdoctor.rules.progress.states import call_words, peer_words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddpdoctor.collect.live import LiveRun
    from ddpdoctor.model.consistency import Consistency
    from ddpdoctor.model.facts import Logger, Rank
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.live import Metric
    from ddpdoctor.rules.progress.job_state import JobState
    from ddpdoctor.rules.progress.states import RankState


MOVES_S = 2.0
# A rank trains if it ended a step within this time, or within the time of this many steps. Our choice: of the last
# steps of a rank, the record may lack four.
MOVES_STEPS = 5
WAITS_S = 1.0  # our choice: shorter waits are a part of most steps
# The best clock first. The others check the same tensors.
CLOCKS = (StreamClock.STEP, StreamClock.FORWARD, StreamClock.END, StreamClock.SYNC)


def read_status(run_dir: Path, *, with_others: bool = True) -> JobNow:
    """Return what the job in a run folder does right now, with or without its other members.

    Raises:
        UserError: the folder is not a run folder, or is damaged.
    """
    return status_of(run_dir, read_live(run_dir, with_others=with_others), datetime.now(timezone.utc))


def status_of(run_dir: Path, live: LiveRun, now: datetime) -> JobNow:
    """Return what a job does, from what was read of it."""
    job, state, running_s, judged = live.job, _state(live), None, None
    if state is not Liveness.ENDED:
        try:
            running_s = max(0.0, (now - datetime.fromisoformat(live.run.started_at or "")).total_seconds())
        except (ValueError, TypeError):
            running_s = None
        try:
            judged = build_job_state(job)
        except Exception:  # noqa: BLE001 - the wall around a rule: what else is known is shown without it
            judged = None
    waits = _waits(judged) if judged is not None else ()
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
        waits=waits,
        waited_for=tuple(sorted({*judged.waits.blockers, *judged.waits.absent}))
        if judged is not None and waits
        else (),
        replicas=_replicas(live.replicas),
        unseen=tuple(one for one in members if one.number != own and not (one.ranks and seen >= set(one.ranks))),
        reported="",
    )


def _state(live: LiveRun) -> Liveness:
    if live.is_running is None:
        return Liveness.ELSEWHERE if live.end is None else Liveness.ENDED
    return Liveness.RUNNING if live.is_running else Liveness.ENDED


def _rank_now(rank: Rank, live: LiveRun, judged: JobState | None) -> RankNow:
    now_ns = live.job.now_ns
    pace = recent_pace(rank.step_times) if rank.step_times is not None else None
    lives = rank.life is Life.RUNNING
    waiting = judged.states.get(rank.rank) if judged is not None else None
    is_at_it = lives and rank.proc_state is None and not _waits_long(waiting, now_ns)
    trains = (
        is_at_it
        and pace is not None
        and (now_ns - pace.ended_ns < max(MOVES_S * 1e9, MOVES_STEPS * pace.step_ms * 1e6))
    )
    # How long it has been in its call, or if it is in none, since its last one ended
    since_ns = waiting.since(now_ns) if waiting is not None else None
    if since_ns is None:
        last = max((rank.started_ns or 0, *pack_calls(rank.recent_calls).ended_ns[-1:]))
        since_ns = now_ns - last if last else None
    # The user's line of its call, or else the last one that was seen
    site = waiting.call.site if waiting is not None and waiting.call is not None else None
    frame = site or rank.last_place
    place = None if frame is None else Place(rank=rank.rank, file=frame.file, line=frame.line, function=frame.function)
    return RankNow(
        rank=rank.rank,
        host=rank.host,
        pid=rank.pid,
        lives=lives,
        trains=trains,
        state="trains" if trains else describe_state(rank),
        since_s=None if trains or not lives or since_ns is None else round(max(0, since_ns) / 1e9, 3),
        where=None if trains else place,
        step=rank.steps or (pace.number if pace is not None else 0),
        step_ms=round(pace.step_ms, 3) if pace is not None else None,
        waits_share=round(pace.waits_share, 4) if pace is not None else None,
        epoch=rank.epochs,
        batch=rank.batches,
        memory_bytes=live.memory_bytes.get((rank.host, rank.pid or 0)) if lives else None,
    )


def _waits_long(state: RankState | None, now_ns: int) -> bool:
    return state is not None and state.waiting and (state.since(now_ns) or 0) > WAITS_S * 1e9


def _waits(judged: JobState) -> tuple[WaitNow, ...]:
    """Return who waits in what, the longest wait first."""
    now_ns, found = judged.time_ns, []
    for number in judged.waits.waiters:
        state = judged.states[number]
        since_ns = state.since(now_ns) or 0
        if state.rank.life is Life.RUNNING and _waits_long(state, now_ns):
            found.append((call_words(state.call) + peer_words(state.call), (number, since_ns)))
    rows = [
        WaitNow(ranks=tuple(n for n, _ in those), call=call, since_s=round(max(ns for _, ns in those) / 1e9, 3))
        for call, those in grouped(found).items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.since_s))


def _replicas(found: Consistency | None) -> ReplicasNow | None:
    streams = [one for one in found.streams if one.compared and one.model > 0] if found is not None else []
    if not streams:
        return None
    clock = next(clock for clock in CLOCKS if any(one.clock is clock for one in streams))
    those = [one for one in streams if one.clock is clock]
    ends = [one.last_equal for stream in those for one in stream.differences] or [one.last_number for one in those]
    return ReplicasNow(
        equal_up_to=None if None in ends else min(filter(None, ends), default=None),
        at=clock.value,
        compared=sum(one.compared for one in those),
        differing=tuple(dict.fromkeys(one.what.value for stream in those for one in stream.differences)),
    )


STATUSES = tuple(status for status in JobStatus if status is not JobStatus.NOT_RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLabels:
    """Whose metrics they are."""

    run: str
    script: str
    version: str
    # Whether this ``wrap`` reports of the whole job. Others report of their ranks only: no sample is double.
    is_first: bool


def read_samples(now: JobNow, report: Report | None, measured: JobLabels) -> tuple[Sample, ...]:
    """Return all samples. ``report`` is that of the job's end, or None while it runs."""
    common = {"run": measured.run, "host": now.host}
    found = list(_of_job(now, report, measured, common)) if measured.is_first else []
    for rank in now.ranks:
        labels = {**common, "host": rank.host, "rank": str(rank.rank)}
        found += [_sample(metric, value, labels) for metric, value in _of_rank(rank) if value is not None]
    return tuple(found)


def _of_job(now: JobNow, report: Report | None, measured: JobLabels, common: dict[str, str]) -> Iterator[Sample]:
    yield _sample(JOB_INFO, 1, common, script=measured.script, version=measured.version)
    ended = report.job if report is not None else None
    status = ended.status if ended is not None else JobStatus.RUNNING
    for one in STATUSES:
        yield _sample(JOB_STATUS, one is status, common, status=one.value)
    if ended is not None and ended.exit_status is not None:
        yield _sample(JOB_EXIT_STATUS, ended.exit_status, common)
    if now.started_at:
        yield _sample(JOB_START_TIME, datetime.fromisoformat(now.started_at).timestamp(), common)
    yield _sample(JOB_RESTARTS, now.attempt, common)
    if now.world_size is not None:
        yield _sample(JOB_RANKS, now.world_size, common)
    if now.replicas is not None:
        replicas = now.replicas
        yield _sample(REPLICAS_EQUAL_UP_TO, replicas.equal_up_to or 0, common)
        yield _sample(REPLICAS_COMPARED, replicas.compared, common)
        yield _sample(REPLICAS_DIFFER, bool(replicas.differing), common)
    if report is not None:
        counts = Counter((one.code, one.kind, one.severity.value) for one in report.findings)
        for (code, kind, severity), count in counts.items():
            yield _sample(FINDINGS, count, common, code=code, kind=kind, severity=severity)


def _of_rank(rank: RankNow) -> Iterator[tuple[Metric, float | None]]:
    yield RANK_UP, rank.lives
    yield RANK_STEPS, rank.step
    yield RANK_STEP_TIME, rank.step_ms / 1000 if rank.step_ms is not None else None
    yield RANK_WAITING, rank.waits_share
    yield RANK_IDLE, 0 if rank.trains else rank.since_s
    yield RANK_EPOCHS, rank.epoch
    yield RANK_BATCHES, rank.batch
    yield RANK_MEMORY, rank.memory_bytes


def _sample(metric: Metric, value: float, common: dict[str, str], /, **labels: str) -> Sample:
    return Sample(metric=metric, labels=tuple({**common, **labels}.items()), value=value + 0)


def find_loggers(run_dir: Path) -> tuple[Logger, ...]:
    """Return each logger that the ranks of this host use, as the lowest rank that uses it does.

    Raises:
        UserError: the run folder is damaged.
    """
    return read_loggers(run_dir)
