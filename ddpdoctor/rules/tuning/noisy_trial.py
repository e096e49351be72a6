"""DD817: the machine is too noisy to tell what a setting gains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.tuning import TuneVerdict
from ddpdoctor.rules.answers import Answer, Problem, judged, passed
from ddpdoctor.rules.registry import rule
from ddpdoctor.rules.speed.comparing import NOISY

from .result import is_noisy

if TYPE_CHECKING:
    from ddpdoctor.model.tuning import TuneResult


@rule("DD817", "noisy-trial", Severity.INFO, "The machine is too noisy to measure what a setting gains")
def check_noise(result: TuneResult) -> Answer:
    """Report a trial in which the script's own settings differ from themselves by more than the effects looked for."""
    noise = result.noise
    seen = f"the script's settings against themselves: {noise.low - 1:+.0%} to {noise.high - 1:+.0%}"
    if result.verdict is not TuneVerdict.NOISY or not is_noisy(noise):
        return passed(seen)
    return judged(
        [
            Problem(
                summary="step times differ too much between rounds to measure what a setting gains",
                evidence=(f"{seen} (95% interval)", f"this noise hides effects of {NOISY:.0%}"),
                fix="run it again on a quiet machine, or with more rounds (--rounds)",
            )
        ]
    )
