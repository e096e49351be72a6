"""Builds the report of `tune --scaling` from the run folders of its launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.collect.run.trial_record import read_trial
from ddpdoctor.diagnose.reports import make_report
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import JobStatus, JobSummary
from ddpdoctor.model.scaling import LaunchKind, ScalingResult
from ddpdoctor.rules.speed.predictions import MeasuredSize, basis_of, predict_sizes
from ddpdoctor.rules.tuning.efficiency import largest_job, launch_of, measure_scaling

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.scaling import PredictedSize, ScalingLaunch, ScalingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFolder:
    """The run folder of one launch."""

    kind: LaunchKind
    ranks: int
    folder: Path


def build_scaling_report(
    launched: Sequence[LaunchFolder], command: tuple[str, ...], started_at: str, notes: tuple[str, ...] = ()
) -> Report:
    """Return the report of launches that all have a result.

    Raises:
        UserError: a folder is no run folder.
    """
    measured = [(one, launch_of(one.kind, one.ranks, read_trial(one.folder), read_job(one.folder))) for one in launched]
    launches = tuple(launch for _, launch in measured if launch is not None)
    rows = measure_scaling(launches)
    largest = largest_job(launches)
    folder = next((one.folder for one, launch in measured if launch is not None and launch == largest), None)
    predicted, reason = _predict(folder, largest, rows)
    result = ScalingResult(
        launches=launches,
        rows=rows,
        predicted=predicted,
        reason=reason,
        spread=largest.spread_ms / largest.step_ms if largest is not None else 0.0,
        measured_ranks=largest.ranks if largest is not None else 1,
        notes=notes,
    )
    return make_report(
        command=command,
        started_at=started_at,
        findings=(),
        checks=(),
        job=JobSummary(world_size=result.measured_ranks, nnodes=1, status=JobStatus.FINISHED, exit_status=0),
        data={"scaling": encode(result)},
    )


def _predict(
    folder: Path | None, largest: ScalingLaunch | None, rows: Sequence[ScalingRow]
) -> tuple[tuple[PredictedSize, ...], str]:
    """Return the step at sizes that were not run, or why nothing is predicted."""
    if folder is None or largest is None or not rows or largest.ranks != rows[-1].ranks:
        return (), "no job of several ranks was measured"
    basis = basis_of(read_job(folder).ranks, largest.step_ms, reductions=max(1, read_trial(folder).forwards))
    if reason := basis.refusal:
        return (), reason
    row = rows[-1]
    size = MeasuredSize(
        ranks=row.ranks, step_ms=row.step_ms, efficiency=row.efficiency, spread_ms=largest.spread_ms
    )  # fmt: skip
    return predict_sizes(basis, size), ""
