"""Scaling efficiency from measured launches, against baselines that had the same share of the machine.

``E = T_alone / T_share * T_share / T_unreduced * T_unreduced / T_N``, over times per sample of a rank: threads, times
contention, times communication and waiting.
"""

from __future__ import annotations

from itertools import chain
from statistics import median, pstdev
from typing import TYPE_CHECKING

from ddpdoctor.model.tuning import LaunchKind, ScalingKind, ScalingLaunch, ScalingRow
from ddpdoctor.rules.speed.state import mean

from .result import conclude
from .settings import UNREDUCED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.tuning import TrialRecord

SAME_BATCH = 0.05
"""Our choice: batches that differ by less are the same. The last one of an epoch is often smaller."""


def launch_of(kind: LaunchKind, ranks: int, trial: TrialRecord, job: Job) -> ScalingLaunch | None:
    """Return what a launch measured, or None if its trial has no result."""
    if not trial.has_result:
        return None
    result = conclude(trial, predictions={})
    ratio = next((row.measured.ratio for row in result.rows if row.setting == UNREDUCED and row.measured), None)
    if ratio is None:
        return None
    return ScalingLaunch(
        kind=kind,
        ranks=ranks,
        step_ms=result.step_ms,
        unreduced_ms=ratio * result.step_ms,
        rows=_rows(job),
        spread_ms=_spread_ms(trial),
        noise=max(abs(result.noise.low - 1), abs(result.noise.high - 1)),
    )


def _rows(job: Job) -> float | None:
    """Return the batch of a rank in a step."""
    known = [median(rank.speed.kept.input_rows) for rank in job.ranks if rank.speed and rank.speed.kept.input_rows]
    return mean(known) or None


def _spread_ms(trial: TrialRecord) -> float:
    """Return how much the time that a rank needs for itself varies: steps without reduction wait for nobody.

    Of each block its own median is taken off, so that a machine that becomes slower does not count.
    """
    blocks = [block for block in trial.blocks if block.setting == UNREDUCED]
    beyond = [time - median(chain(*block.ranks_ms)) for block in blocks for time in chain(*block.ranks_ms)]
    return pstdev(beyond) if beyond else 0.0


def measure_scaling(launches: Sequence[ScalingLaunch]) -> tuple[ScalingRow, ...]:
    """Return the efficiency for each job of several ranks whose baselines were measured, by rising size."""
    alone = next((one for one in launches if one.kind is LaunchKind.ALONE), None)
    shares = {one.ranks: one for one in launches if one.kind is LaunchKind.SHARE}
    jobs = sorted((one for one in launches if one.kind is LaunchKind.JOB), key=lambda one: one.ranks)
    if alone is None:
        return ()
    return tuple(_row(alone, shares[job.ranks], job) for job in jobs if job.ranks in shares)


def _row(alone: ScalingLaunch, share: ScalingLaunch, job: ScalingLaunch) -> ScalingRow:
    is_known = all(one.rows is not None for one in (alone, share, job))
    one_ms, share_ms, job_ms = (one.step_ms / (one.rows or 1.0 if is_known else 1.0) for one in (alone, share, job))
    communication = min(1.0, job.unreduced_ms / job.step_ms)
    return ScalingRow(
        ranks=job.ranks,
        kind=kind_of(alone.rows, job.rows, job.ranks) if is_known else ScalingKind.UNKNOWN,
        step_ms=job.step_ms,
        rows=job.rows,
        efficiency=one_ms / job_ms,
        threads=one_ms / share_ms,
        contention=share_ms / (job_ms * communication),
        communication=communication,
        noise=max(alone.noise, share.noise, job.noise),
    )


def kind_of(one_rows: float | None, rows: float | None, ranks: int) -> ScalingKind:
    """Return what stayed the same: the batch of a rank, or the batch of all ranks together."""
    if one_rows is None or rows is None:
        return ScalingKind.UNKNOWN
    if _is_same(rows, one_rows):
        return ScalingKind.WEAK
    return ScalingKind.STRONG if _is_same(rows * ranks, one_rows) else ScalingKind.NEITHER


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME_BATCH * max(one, other)


def largest_job(launches: Iterable[ScalingLaunch]) -> ScalingLaunch | None:
    """Return the job of most ranks, or None without a job."""
    return max((one for one in launches if one.kind is LaunchKind.JOB), key=lambda one: one.ranks, default=None)
