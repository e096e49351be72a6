"""The changes worth predicting for a job: other buckets, fewer or smaller reductions, workers, a fault repaired."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.predictions import Bound, PredictedStep

from .input import predict_workers
from .predictions import basis_of, predict_setting
from .simulation import CAPS_BYTES, best_cap
from .steps import mean, usual
from .words import is_small

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.findings import Finding

    from .curves import MeasuredCurves
    from .predictions import PredictionBasis
    from .state import SpeedState

LEAST_SHARE = 0.05
"""Parts of the step below this are not worth a prediction. Our choice: predictions are off by about as much."""
ACCUMULATED = 4
"""Our choice: over how many batches a step without accumulation is predicted to accumulate."""
PREDICTED_ELSEWHERE = frozenset(
    {"input-bound", "bucket-size", "accumulation-sync", "communication-bound", "buffer-broadcast"}
)
"""Kinds of findings whose fix is one of the settings here."""
FAULT_ASSUMES = "it goes away completely, and nothing else gets slower"


def predict_changes(
    state: SpeedState, findings: Iterable[Finding] = (), curves: MeasuredCurves | None = None
) -> tuple[PredictedStep, ...]:
    """Return what changes would do to the step of a job, the largest gain first; those that were refused come last."""
    if is_small(state):
        return ()
    basis = job_basis(state, curves)
    predicted = [*_reductions(state, basis), *_workers(state), *(_without(one) for one in findings if _has_share(one))]
    return tuple(sorted(predicted, key=lambda one: (one.ratio is None, -one.gain)))


def job_basis(state: SpeedState, curves: MeasuredCurves | None = None) -> PredictionBasis:
    """Return what predictions go from, by the job's budget."""
    per_step = min((int(median(rank.reductions)) for rank in state.steps.ranks.values()), default=1)
    basis = basis_of(state.ranks, state.budget.wall_ms, curves, reductions=max(1, per_step))
    return replace(
        basis,
        exposed_ms=mean(state.steps.transfer_ms.get("exposed", ())),
        buffers_ms=usual(state.steps.transfer_ms.get("buffers", ())),
    )


def _reductions(state: SpeedState, basis: PredictionBasis) -> list[PredictedStep]:
    """Predict what changes how gradients and buffers are sent."""
    settings = []
    if state.share(basis.exposed_ms) >= LEAST_SHARE:
        fewer = "no_sync" if basis.reductions > 1 else f"accumulate={ACCUMULATED}"
        settings = [f"bucket_cap={_best_cap(basis)}", fewer, "bf16_reduction", "find_unused_off"]
    if state.share(basis.buffers_ms) >= LEAST_SHARE:
        settings.append("buffers_off")
    return [one for setting in settings if (one := predict_setting(basis, setting)) is not None]


def _best_cap(basis: PredictionBasis) -> int:
    """Return the cap that saves most, or any if that cannot be predicted."""
    if basis.gradients is None or not basis.networks:
        return CAPS_BYTES[0]
    return best_cap(basis.gradients, basis.networks, CAPS_BYTES)[0]


def _workers(state: SpeedState) -> list[PredictedStep]:
    predicted = predict_workers(state)
    return [] if predicted is None else [predicted]


def _has_share(finding: Finding) -> bool:
    return finding.share is not None and finding.kind not in PREDICTED_ELSEWHERE


def _without(finding: Finding) -> PredictedStep:
    """Predict the step without a fault. What remains of it, or comes to light behind it, is not known."""
    ratio = 1 - (finding.share or 0.0)
    return PredictedStep(
        setting=f"without={finding.kind}",
        change=f"{finding.kind} ({finding.code}) fixed",
        ratio=ratio,
        low=ratio,
        high=1.0,
        bound=Bound.UP_TO,
        assumes=FAULT_ASSUMES,
    )
