"""Sums up the starts of a job: what each failure cost, how often it fails, and who returns in the verdicts. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import JobStatus
from ddpdoctor.model.history import Blamed, Cost, History, Returning

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from ddpdoctor.model.history import Start


def sum_up(command: tuple[str, ...], starts: Sequence[Start], now: datetime) -> History:
    """Return the history of a job from its starts, in their order."""
    failures = sum(start.failed for start in starts)
    ran_s = sum(filter(None, (ran_seconds(start, now) for start in starts)))
    began = [start.began_at for start in starts if start.began_at is not None]
    ended = [end for start in starts if (end := _end_of(start, now)) is not None]
    return History(
        command=command,
        starts=tuple(starts),
        costs=tuple(cost_of(starts, at) for at in range(len(starts))),
        failures=failures,
        span_s=(max(ended) - min(began)).total_seconds() if began and ended else None,
        between_failures_s=ran_s / failures if failures else None,
        returning=find_returning(starts),
    )


def ran_seconds(start: Start, now: datetime) -> float | None:
    """Return how long a start ran, until now if it still does."""
    end = _end_of(start, now)
    return max(0.0, (end - start.began_at).total_seconds()) if end is not None and start.began_at is not None else None


def _end_of(start: Start, now: datetime) -> datetime | None:
    return now if start.status is JobStatus.RUNNING else start.ended_at or start.last_progress_at or start.began_at


def cost_of(starts: Sequence[Start], at: int) -> Cost:
    """Return what the end of a start cost. Of one that finished, still runs or is the last, nothing is known."""
    start = starts[at]
    if at + 1 >= len(starts) or start.status in {JobStatus.FINISHED, JobStatus.RUNNING}:
        return Cost(steps=None, seconds=None)
    following = starts[at + 1]
    return Cost(steps=_lost_steps(start, following), seconds=_lost_seconds(start, following))


def _lost_seconds(start: Start, following: Start) -> float | None:
    """Return the time from the last progress to the next first step.

    If the next start made no step, it ends with the beginning of that: the rest is what the failure of that one costs.
    """
    last = start.last_progress_at or start.began_at
    first = following.first_step_at or following.began_at
    return max(0.0, (first - last).total_seconds()) if last is not None and first is not None else None


def _lost_steps(start: Start, following: Start) -> int | None:
    """Return how many steps the next start made again at most.

    Those are the steps since the last torch.save, else since the epoch with which the next start began.
    """
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
    return min(start.steps, sum(one.steps for one in start.passes if one.epoch >= resumed))


def find_returning(starts: Iterable[Start]) -> tuple[Returning, ...]:
    """Return who is blamed in two failures or more: a rank on a host, else a host, else a rank.

    Of ranks that move to other hosts only the host, or only the rank, may return.
    """
    failed = [start for start in starts if start.failed]
    several = any(start.hosts > 1 for start in failed)
    counts: list[Counter[Blamed]] = [Counter(), Counter(), Counter()]
    for start in failed:
        pairs = {one for one in start.blamed if one.rank is not None}
        counts[0].update(pairs)
        counts[1].update({Blamed(host=one.host) for one in start.blamed if one.host and several})
        counts[2].update({Blamed(rank=one.rank) for one in pairs})
    most = max((times for counter in counts for times in counter.values()), default=0)
    chosen = next((counter for counter in counts if most in counter.values()), Counter[Blamed]())
    rows = [Returning(who=who, times=times) for who, times in chosen.items() if times > 1]
    return tuple(sorted(rows, key=lambda row: (-row.times, row.who.host, row.who.rank or 0)))
