"""What a report says of speed: the time budget of a step, and what changes are predicted to gain."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.reading import Unread
from ddpdoctor.rules.speed.comparing import network_use, settings_of
from ddpdoctor.rules.speed.gradients import overlap_of
from ddpdoctor.rules.speed.predictions import predict_changes
from ddpdoctor.rules.speed.reduction import curves_of
from ddpdoctor.rules.speed.state import build_speed_state

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.rules.bandwidth.compare import Baseline
    from ddpdoctor.rules.speed.reduction import MeasuredCurves


def speed_data(job: Job, findings: Iterable[Finding], curves: MeasuredCurves | None = None) -> dict[str, Any]:
    """Encode the budget and the predictions. Without a budget, say why, and whether the user asked for it."""
    try:
        known = _known(job, findings, curves)
    except Exception as error:  # noqa: BLE001 - damaged records of one rank must not cost the report
        known = {"reason": f"{type(error).__name__}: {error}"}
    return {"asked": job.speed_asked, **known}


def predict_by_curve(report: Report, folder: Path, bench: Baseline) -> Report:
    """Return a report whose predictions use the times that ``allreduce-bench`` measured.

    Raises:
        UserError: the folder holds no run, it has no budget, or the bench measured no float32 all-reduces.
    """
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


def _known(job: Job, findings: Iterable[Finding], curves: MeasuredCurves | None) -> dict[str, Any]:
    found = build_speed_state(job)
    if isinstance(found, Unread):
        return {"reason": found.reason}
    predictions = predict_changes(found, findings, curves)
    network = network_use(found, curves)
    return {
        "budget": encode(replace(found.budget, overlap=overlap_of(found))),
        "settings": encode(settings_of(found)),
        "network": None if network is None else encode(network),
        "predictions": [encode(one) for one in predictions],
    }
