"""DD803: reducing gradients takes a large part of the step, whatever the buckets."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import rule

from .buckets import contested
from .models import reduced_models
from .simulation import CAPS_BYTES, MIB, best_cap, gather, networks_of
from .steps import mean
from .words import SHARE, call_places, is_small, ms, percent

if TYPE_CHECKING:
    from .simulation import BucketGradients
    from .state import SpeedState

LARGE_TENSOR = 0.5
"""The facts' figure: one tensor that holds more than half of the bytes is named."""
CONTESTED_SHARE = 0.2
"""Where cores are contested, the reduction waits for them too. Our choice: twice the share of another machine."""
LEAST_BYTES = MIB
"""With fewer gradients than this a reduction is latency, and not a matter of bandwidth: the facts' figure."""


@rule(
    "DD803", "communication-bound", Severity.WARNING, "Reducing gradients takes a large part of the step",
    after=("bucket-size", "accumulation-sync"),
)  # fmt: skip
def check_communication(state: SpeedState) -> Answer:
    """Report a job whose reductions take long, whatever the buckets.

    ## What it means

    The model has more gradients than the network can move while backward computes. Other bucket sizes would save
    little.

    ## How it is recognized

    The reduction's time beyond backward's own computation is 10 % of a step of at least 10 ms, on the rank that waits
    least, and no bucket size is predicted to save a third of it. Where ranks wait for cores or compute on most of them,
    it must be 20 %, and nothing is predicted. Reductions that accumulation does not need are left to
    `accumulation-sync`.

    ## How sure

    High where bucket sizes could be predicted, else medium. The share assumes that half the bytes are moved.

    ## What to do

    Move fewer bytes or move them less often: larger batches, or accumulation with `no_sync`; gradients in bf16
    (`ddp_comm_hooks.default_hooks.bf16_compress_hook`), which changes numbers; `sparse=True` for a large embedding of
    which few rows are used. `ddpdoctor allreduce-bench` checks whether the network is as fast as expected.

    ## Example

        gradient reduction takes 45 % of the step beyond backward, and no bucket size helps
    """
    counts = [median(rank.reductions) for rank in state.steps.ranks.values()]
    exposed_ms = state.steps.transfer_ms["exposed"]
    transfer_ms = min(mean(exposed_ms), median(exposed_ms or (0.0,)))  # a few steps of a busy machine do not count
    needed_ms = transfer_ms / max(1, int(min(counts)))
    share = state.share(needed_ms)
    seen = f"beyond backward, the reduction takes {ms(needed_ms)} of a {ms(state.budget.wall_ms)} step"
    models = reduced_models(state)
    gradients = gather(list(models[0].times.values())) if len(models) == 1 else None
    reason = contested(state, gradients)
    if share < (CONTESTED_SHARE if reason else SHARE):
        return passed(seen)
    if small := is_small(state):
        return skipped(small)
    if gradients is not None and sum(gradients.bucket_bytes) < LEAST_BYTES:
        return passed(f"{seen}; all gradients together are under 1 MiB")
    saved_ms = None if reason else _saved_by_buckets_ms(gradients)
    if saved_ms is not None and gradients is not None and saved_ms >= min(needed_ms, gradients.exposed_ms) / 3:
        return passed(f"{seen}; another bucket size would save {percent(state.share(saved_ms))} of the step")
    known = saved_ms is not None
    problem = Problem(
        confidence=Confidence.HIGH if known else Confidence.MEDIUM,
        summary=f"gradient reduction takes {percent(share)} of the step beyond backward"
        + (", and no bucket size helps" if known else ""),
        ranks=tuple(state.steps.ranks),
        where=call_places(state, {"backward"}),
        evidence=(seen, *_sizes(gradients)),
        fix="use larger batches, accumulation with no_sync, or DDP's bf16 hook, which changes the results; run "
        "`ddpdoctor allreduce-bench` to check the network",
        share=share / 2,
    )
    return judged([problem])


def _saved_by_buckets_ms(gradients: BucketGradients | None) -> float | None:
    """Return what the best bucket size saves in one reduction, or None if that cannot be predicted."""
    networks = networks_of(gradients) if gradients is not None else ()
    return best_cap(gradients, networks, CAPS_BYTES)[1].mid_ms if gradients is not None and networks else None


def _sizes(gradients: BucketGradients | None) -> tuple[str, ...]:
    """Say how much is reduced, and if one tensor is most of it."""
    if gradients is None:
        return ()
    total, largest = sum(gradients.sizes_bytes), max(gradients.sizes_bytes)
    seen = f"{format_size(total)} of gradients are reduced in each backward"
    if largest <= LARGE_TENSOR * total:
        return (seen,)
    return (seen, f"one tensor has {percent(largest / total)} of them; an embedding can use sparse=True")
