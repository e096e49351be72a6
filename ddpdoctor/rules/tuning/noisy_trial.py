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
    """Report a trial in which the script's own settings differ from themselves by more than the effects looked for.

    ## What it means

    `ddpdoctor tune` tries the settings of the script twice in each round, as if they were two settings. What differs
    between the two is noise: other programs on the machine, a shared network, or steps of different lengths. An effect
    that is smaller than this noise cannot be told from chance.

    ## How it is recognized

    In each round the step under the script's settings is compared with the step under the same settings, tried again.
    Reported is a 95% interval of this ratio that reaches more than 5% from 1, if no setting gains more than that.

    ## How sure

    High: it says only that the trial cannot tell. A setting that gains more than the noise is named all the same.

    ## What to do

    Run the trial again while nothing else runs on the machine, or with more rounds: the interval narrows with the
    square root of their number. Steps of very different lengths, as with sentences that are not sorted by length,
    need more rounds too.

    ## Example

    On two cores that other jobs use as well, a step of the same job takes 48 ms in one round and 61 ms in the next.
    """
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
