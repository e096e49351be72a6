"""DD805: gradients are reduced after every micro-batch, though the optimizer steps once for several of them."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import rule

from .steps import mean
from .words import call_places, is_small, ms, up_to

if TYPE_CHECKING:
    from .state import SpeedState

SAVED_SHARE = 0.05
"""Share of the step that must be saved. Our choice: half of what other causes must take, because the fix is one line
and changes no number."""


@rule(
    "DD805", "accumulation-sync", Severity.WARNING, "Gradients are reduced after every micro-batch of an optimizer step"
)
def check_accumulation(state: SpeedState) -> Answer:
    """Report a DDP model whose gradients are reduced several times in each optimizer step.

    ## What it means

    The script adds up the gradients of several micro-batches before the optimizer steps. DDP does not know that, and
    averages the gradients over all ranks after each backward. Only the last reduction is needed, because sums and
    averages can be swapped.

    ## How it is recognized

    The recorder counts the reductions of each DDP model between two optimizer steps. Reductions of different models, as
    in a GAN, are counted apart. With k reductions, (k - 1)/k of the time that reductions take beyond backward's own
    computation would be saved. That must be 5 % of a step of at least 10 ms.

    ## How sure

    High: reductions are counted. The saving is a lower bound where reductions also take cores from backward.

    ## What to do

    Run forward and backward of all but the last micro-batch inside `with model.no_sync():`. Forward must be inside too:
    DDP decides there. Trainers do this by themselves when they are told to accumulate.

    ## Example

        gradients are reduced 4 times per optimizer step, but once is enough: up to 31 % of the step
    """
    reductions = min(int(median(rank.reductions)) for rank in state.steps.ranks.values())
    if reductions < 2:
        return passed("gradients are reduced once per optimizer step" if reductions else "no reduction was seen")
    if small := is_small(state):
        return skipped(small)
    transfer_ms = mean(state.steps.transfer_ms["exposed"])
    saved_ms = transfer_ms * (reductions - 1) / reductions
    share = state.share(saved_ms)
    if share < SAVED_SHARE:
        return passed(f"{reductions} reductions per optimizer step take {ms(transfer_ms)}")
    problem = Problem(
        summary=f"gradients are reduced {reductions} times per optimizer step, but once is enough: {up_to(share)}",
        ranks=tuple(state.steps.ranks),
        where=call_places(state, {"backward"}),
        evidence=(_evidence(reductions, transfer_ms, state.budget.wall_ms),),
        fix=_fix(state),
        share=share,
    )
    return judged([problem])


def _evidence(reductions: int, transfer_ms: float, wall_ms: float) -> str:
    return (
        f"{reductions} backwards with a reduction per optimizer step; beyond backward's own computation, the "
        f"reductions take {ms(transfer_ms)} of a {ms(wall_ms)} step"
    )


def _fix(state: SpeedState) -> str:
    frameworks = state.frameworks
    if "lightning" in frameworks:
        return "Trainer(accumulate_grad_batches=N), which skips the reductions in between"
    if "accelerate" in frameworks:
        return "Accelerator(gradient_accumulation_steps=N), and `with accelerator.accumulate(model):` around each batch"
    return "run the forward and backward of all micro-batches but the last inside `with model.no_sync():`"
