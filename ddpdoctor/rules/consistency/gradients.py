"""DD503: the gradients given to the optimizer differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import What
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.registry import rule

from .gradient_causes import why_gradients_differ
from .problems import problems_of
from .survey import ruling, survey

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.answers import Answer


@rule(
    "DD503", "grad-drift", Severity.ERROR, "Ranks gave their optimizers different gradients", after=("nonfinite-grad",)
)
def check_gradients(job: Job) -> Answer:
    """Report gradients that differ between ranks right before an optimizer's step.

    ## What it means

    DDP gives all ranks the mean of their gradients. If the optimizer gets different gradients, each rank trains its own
    model from this step on. Nothing crashes, and the loss still falls.

    ## How it is recognised

    Right before optimizer steps 1, 2, 4, ... and then every `--check-every`-th, each rank writes 16 bytes per gradient.
    The parent process compares those of the same step by name. What else was seen shows the cause:

    | seen since the previous step | cause |
    |---|---|
    | no forward of DDP | `ddp.module(x)` or the original module was called instead |
    | all forwards under `no_sync()` | `step()` is inside it, or only the forward is |
    | the last forwards under `no_sync()` | gradients were added after the reduction |
    | DDP was not given the parameter | it was added, replaced or unfrozen after wrapping |
    | a communication hook from the script | it does not leave the same gradients on all ranks |
    | the gradient scalers have different scales | each rank unscales its gradients by its own number |
    | none of these | changed after the reduction: clipped, scaled or edited on one rank |

    Not compared: ranks inside DDP's `join`, post-local SGD, and steps of the same number at which ranks had reduced
    different numbers of backwards. A script that reduces gradients by itself has equal gradients, so there is no alarm.

    ## How sure

    High if a majority is equal, or if ranks were seen to do something wrong. Otherwise all ranks are named: low.

    ## What to do

    Call the DDP object itself in training. Keep the forward and the backward of the last batch before `step()` out of
    `no_sync()`. Wrap the model once it is complete. Treat gradients alike on all ranks.

    ## Example

        gradients differ between ranks 0 and 1 at step 1: the model was trained past DDP, whose forward did not run
        before the step
    """
    seen = survey(job, What.GRADIENT, why_gradients_differ)
    return ruling(job, seen, problems_of(job, seen.found, "gradients"), "gradients")
