"""DD501: parameters differ between ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.registry import rule

from .parameter_causes import UNEVEN_STEPS, why_parameters_differ
from .problems import problems_of
from .replicas import is_aligned, sightings
from .survey import ruling, survey
from .unwrapped import unwrapped_drift

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.answers import Answer

    from .survey import Found


@rule("DD501", "param-drift", Severity.ERROR, "Ranks hold different parameters", after=("grad-drift",))
def check_parameters(job: Job) -> Answer:
    """Report parameters that differ between ranks that are to hold the same.

    ## What it means

    DDP sends parameters once, when the model is wrapped. From then on they are equal only because equal gradients go
    through equal optimizers. Where they are not, each rank trains another model: gradients are still averaged, of
    different models, and what is saved is that of one rank.

    ## How it is recognised

    Right after steps 1, 2, 4, ... and every `--check-every`-th, and once more at the end, each rank writes 16 bytes a
    parameter. The parent compares those of equal steps by name. The first tensor in the model's order is named, with
    the first step at which it was different and the last at which all was equal. What else was seen tells the cause:

    | seen | cause |
    |---|---|
    | gradients differ as well | they were not reduced: see DD503 |
    | more steps than reductions | some step in between was made with gradients of the rank alone |
    | numbers of steps differ | `step()` on some ranks only |
    | settings differ | learning rate, weight decay, ...: given by rank, or by a scheduler of one rank |
    | the optimizer is LBFGS | its line search goes by the loss of each rank |
    | state of the optimizer differs | it was loaded on one rank |
    | nothing of these | a checkpoint loaded on one rank after wrapping, or an edit in place |

    Gradients of the steps in between are not seen. Where there were such steps, the last two causes say that gradients
    may have been changed there instead, and `--check-every 1` tells.

    On a device mesh the ranks are compared that hold the same part of a tensor: in the replicating dimension of hybrid
    FSDP, where a DTensor is placed as `Replicate`, and (on a CPU) plain parameters that `parallelize_module` leaves.
    Shards are compared with none.

    No alarm: parameters that DDP was told to ignore, `--allow-different`, ranks inside `join`, local SGD and post-local
    SGD whose parameters are averaged, and what a rank loads once training is over.

    A model that no DDP holds is looked at too, before its optimizer's first step and after the same steps. It is meant
    to be equal where all ranks step with equal gradients, which somebody has exchanged then, and where it is trained by
    a loss of its own and DDP's model through it, as the discriminator of a GAN or a critic. Any other such model may be
    a rank's own, as an expert or a personal head: no alarm, whatever it holds.

    ## How sure

    High where a majority is equal: the minority is to blame. With two ranks, or no majority, all are named: low.

    ## What to do

    Load checkpoints on all ranks, or before wrapping. Give optimizers and schedulers the same numbers on all ranks, and
    call both on all of them.

    ## Example

        parameters differ between ranks 0-2 after step 50: something other than the optimizer's step changed them on
        rank 0, as a checkpoint that was loaded there alone or an edit in place, or gradients were changed after the
        reduction at a step in between, which was not compared
    """
    seen = survey(job, What.PARAMETER, why_parameters_differ)
    found = [*(_since(one) for one in seen.found), *unwrapped_drift(job)]
    return ruling(job, seen, problems_of(job, found, "parameters"), "parameters")


def _since(found: Found) -> Found:
    """Return a difference with the step at which ranks were first seen to have made different numbers of steps.

    Such ranks are compared at the end only, where they had equally many backwards.
    """
    sighting = found.sighting
    if found.cause.name != UNEVEN_STEPS or sighting.stream.clock is not StreamClock.END:
        return found
    if any(values.steps == 0 for values in sighting.values):
        return replace(found, since=1)
    first = next((one.step for one in sightings(sighting.replica, What.PARAMETER) if not is_aligned(one.values)), None)
    return replace(found, since=first)
