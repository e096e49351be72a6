"""DD807: DDP sends large buffers from rank 0 before every forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import rule

from .models import knob
from .steps import usual
from .words import SHARE, is_small, model_places, ms, up_to

if TYPE_CHECKING:
    from .state import SpeedState


KNOBS = {
    "": "DistributedDataParallel(broadcast_buffers=False)",
    "lightning": "DDPStrategy(broadcast_buffers=False)",
    "transformers": "TrainingArguments(ddp_broadcast_buffers=False)",
    "accelerate": "DistributedDataParallelKwargs(broadcast_buffers=False)",
}


@rule("DD807", "buffer-broadcast", Severity.WARNING, "Broadcasting DDP buffers takes a large part of the step")
def check_buffers(state: SpeedState) -> Answer:
    """Report a DDP model whose buffers take long to broadcast before each forward.

    ## What it means

    Before each forward in training, DDP sends all buffers of the model from rank 0 to the other ranks. That is meant
    for the running statistics of BatchNorm, a few kilobytes. A large table that was registered as a buffer is sent too,
    in every step, although it never changes. `persistent=False` keeps a buffer out of checkpoints only: it is sent.

    ## How it is recognized

    The recorder times the broadcast on each rank. The shortest time of all ranks is the transfer; what others spend
    beyond it is waiting, and does not count. The transfer must be 10 % of a step of at least 10 ms.

    ## How sure

    High: the transfer is measured.

    ## What to do

    Keep constants in a plain attribute instead of a buffer, or name them in
    `_set_params_and_buffers_to_ignore_for_model`. If no buffer has to be equal on all ranks, pass
    `broadcast_buffers=False`. With BatchNorm that leaves each rank with statistics of its own: SyncBatchNorm keeps them
    equal.

    ## Example

        DDP broadcasts buffers before each forward: up to 48 % of the step
    """
    transfer_ms = usual(state.steps.transfer_ms["buffers"])
    share = state.share(transfer_ms)
    seen = f"the broadcast takes {ms(transfer_ms)} of a {ms(state.budget.wall_ms)} step"
    if share < SHARE:
        return passed(seen)
    if small := is_small(state):
        return skipped(small)
    problem = Problem(
        summary=f"DDP broadcasts buffers before each forward: {up_to(share)}",
        ranks=tuple(state.steps.ranks),
        where=model_places(state),
        evidence=(seen,),
        fix="keep constants in a plain attribute instead of a buffer (persistent=False buffers are sent too), or pass "
        f"{knob(state, KNOBS)} if the buffers may differ between ranks",
        share=share,
    )
    return judged([problem])
