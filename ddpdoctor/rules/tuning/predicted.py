"""What a trial's settings are predicted to change, from when each gradient was ready under the script's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.tuning import RatioRange
from ddpdoctor.rules.speed.simulation import Prediction, gather, networks_of, predict_cap

from .settings import CAP, UNREDUCED, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.speed.simulation import BucketGradients


def predict_settings(job: Job, settings: Iterable[str], step_ms: float) -> dict[str, RatioRange]:
    """Return the predicted step by setting, as a ratio to the present one, for settings that can be predicted."""
    gradients = _gradients(job)
    if gradients is None or not step_ms:
        return {}
    saved = {setting: _saved(gradients, setting) for setting in settings}
    return {setting: _ratio(one, step_ms) for setting, one in saved.items() if one is not None}


def _gradients(job: Job) -> BucketGradients | None:
    ranks = [rank.gradient_times[0] for rank in job.ranks if len(rank.gradient_times) == 1]
    return gather(ranks) if ranks and len(ranks) == len(job.ranks) else None


def _saved(gradients: BucketGradients, setting: str) -> Prediction | None:
    """Return what a setting saves of backward."""
    if name_of(setting) == UNREDUCED:
        all_ms = gradients.end_ms - gradients.compute_end_ms
        return Prediction(low_ms=all_ms, mid_ms=all_ms, high_ms=all_ms)
    networks = networks_of(gradients)
    if name_of(setting) != CAP or not networks:
        return None
    return predict_cap(gradients, networks, int(setting.partition("=")[2]))


def _ratio(saved: Prediction, step_ms: float) -> RatioRange:
    low, mid, high = (max(0.0, 1 - ms / step_ms) for ms in (saved.high_ms, saved.mid_ms, saved.low_ms))
    return RatioRange(ratio=mid, low=low, high=high)
