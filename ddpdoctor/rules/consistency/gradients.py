"""DD503: gradients differ that the optimizer was given."""

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

    DDP gives all ranks the mean of their gradients. Where an optimizer is given others, each rank trains a model of its
    own from this step on. Nothing crashes, and the loss still falls.

    ## How it is recognised

    At steps 1, 2, 4, ... and then at every `--check-every`-th, each rank writes 16 bytes a gradient right before the
    step, and the parent compares those of equal steps by name. The cause is told by what else was seen:

    | seen since the step before | cause |
    |---|---|
    | no forward of DDP | `ddp.module(x)`, or the module that was wrapped, was called in its place |
    | all forwards under `no_sync()` | `step()` inside it, or it stands around the forward only |
    | the last forwards under `no_sync()` | gradients were added after the reduction |
    | DDP was not given the parameter | added, replaced or unfrozen after wrapping |
    | a communication hook of the script's | it does not leave the same on all ranks |
    | the gradient scalers have different scales | gradients are unscaled by numbers of the ranks' own |
    | nothing of these | changed after the reduction: clipped, scaled or edited on one rank |

    Not compared: ranks inside DDP's `join`, post-local SGD, and steps of equal numbers at which ranks had not come
    equally far. A script that reduces by itself has equal gradients, and no alarm.

    ## How sure

    High where a majority is equal, or where the ranks were seen to do what is wrong. Otherwise all are named: low.

    ## What to do

    Call the DDP object itself in training. Keep the forward and the backward of the last batch before `step()` out of
    `no_sync()`. Wrap the model once it is complete. Treat gradients alike on all ranks.

    ## Example

        gradients differ between ranks 0 and 1 at step 1: the model was trained past DDP, whose forward did not run
        before the step
    """
    seen = survey(job, What.GRADIENT, why_gradients_differ)
    return ruling(job, seen, problems_of(job, seen.found, "gradients"), "gradients")
