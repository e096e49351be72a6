"""Finds when things happened in a job: its beginning and end, the fault, the ends of ranks, the stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Life
from ddpdoctor.model.sides import grouped
from ddpdoctor.rules.progress.states import final_error, is_over

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.facts import Call, Job, Rank
    from ddpdoctor.model.findings import RankRow


def began_ns(job: Job) -> int:
    """Return when the first rank started, or the launch if no rank was recorded."""
    return min((rank.started_ns for rank in job.ranks if rank.started_ns), default=job.launched_ns)


def until_ns(job: Job) -> int:
    """Return when the last rank ended, or now if one still runs. It is not before any recorded call."""
    seen = [rank.ended_ns or job.now_ns for rank in job.ranks if rank.life is not Life.NEVER_STARTED]
    return max([*seen, *(last_call_ns(rank) for rank in job.ranks), began_ns(job)])


def last_call_ns(rank: Rank) -> int:
    """Return when the rank's last recorded call began or ended, or 0 if none was recorded."""
    ended = [call.ended_ns or 0 for call in rank.recent_calls[-1:]]
    return max([0, *ended, *(call.started_ns for call in rank.open_calls)])


def open_call(rank: Rank, stopped_ns: int | None) -> Call | None:
    """Return the innermost call that the main thread was in at the end, or when the job was stopped."""
    calls = [call for call in rank.open_calls if call.thread_is_main and (not call.is_async or call.op == "work_wait")]
    if calls:
        return max(calls, key=lambda call: call.index)
    last = rank.recent_calls[-1] if len(rank.recent_calls) else None
    if last is None or stopped_ns is None or not last.thread_is_main or (last.ended_ns or 0) < stopped_ns:
        return None
    return last if last.started_ns < stopped_ns else None


def fault_ns(job: Job, blamed: Iterable[int]) -> int | None:
    """Return when the first of the blamed ranks failed, ended, was frozen, or was last seen to do something."""
    ranks = (rank for rank in job.ranks if rank.rank in set(blamed) and rank.life is not Life.NEVER_STARTED)
    times = [at for rank in ranks if (at := _fault_of(rank, job.stopping_since_ns))]
    return min(times, default=None)


def _fault_of(rank: Rank, stopped_ns: int | None) -> int | None:
    ended = rank.ended_ns if is_over(rank) else None
    known = filter(None, (failed_ns(rank), ended, rank.frozen_since_ns, rank.main_ended_ns))
    at = min((one for one in known if stopped_ns is None or one <= stopped_ns), default=None)
    if at is not None:
        return at
    call = open_call(rank, stopped_ns)
    return (call.started_ns if call is not None else 0) or last_call_ns(rank) or rank.started_ns


def failed_ns(rank: Rank) -> int | None:
    """Return when a rank failed, or None if it did not, or only because it was stopped."""
    error = final_error(rank)
    if error is not None:
        return error.time_ns
    is_bad = rank.life is Life.SIGNALED or (rank.life is Life.EXITED and rank.exit_code not in {0, None})
    return rank.ended_ns if is_bad and is_over(rank) else None


def over_at_ns(rank: Rank, hung_until_ns: int | None) -> int | None:
    """Return when a rank failed or ended, whichever came first, or None if it lived until the job was stopped.

    ``hung_until_ns`` is when a hung job was stopped: what a rank raises after that is no failure of its own.
    """
    failed = failed_ns(rank)
    if failed is not None and hung_until_ns is not None and failed > hung_until_ns:
        failed = None
    known = filter(None, (failed, rank.ended_ns if is_over(rank) else None))
    return min(known, default=None)


def failures(job: Job, rows: Mapping[int, RankRow]) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return the time, the words and the ranks of all failures; ranks that failed alike are one, at the first time."""
    before_ns = job.stopping_since_ns
    found = [(rank, at) for rank in job.ranks if rank.rank in rows and (at := failed_ns(rank))]
    alike = grouped(
        (rows[rank.rank].state, (at, rank.rank)) for rank, at in found if before_ns is None or at <= before_ns
    )
    return [(min(times)[0], state, tuple(sorted(one for _, one in times))) for state, times in alike.items()]
