"""What a trial's settings are predicted to change, from when each gradient was ready under the script's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.tuning import RatioRange
from ddpdoctor.rules.speed.predictions import basis_of, predict_setting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.tuning import PredictedStep


def predict_settings(job: Job, settings: Iterable[str], step_ms: float, reductions: int = 1) -> dict[str, RatioRange]:
    """Return the predicted step by setting, as a ratio to the present one. What cannot be predicted is left out.

    ``reductions`` is the number of reductions in each step under the script's settings.
    """
    if not step_ms:
        return {}
    basis = basis_of(job.ranks, step_ms, reductions=max(1, reductions))
    found = {setting: _range(predict_setting(basis, setting)) for setting in settings}
    return {setting: one for setting, one in found.items() if one is not None}


def _range(step: PredictedStep | None) -> RatioRange | None:
    if step is None or step.ratio is None or step.low is None or step.high is None:
        return None
    return RatioRange(ratio=step.ratio, low=step.low, high=step.high)
