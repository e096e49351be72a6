"""DD804: buckets of DDP whose size keeps the reduction from running beside backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from .contention import contention
from .models import built_at, knob, reduced_models
from .simulation import CAPS_BYTES, MANY_BUCKETS, MIB, best_cap, gather, networks_of
from .steps import mean

if TYPE_CHECKING:
    from .models import ReducedModel
    from .simulation import BucketGradients
    from .state import SpeedState

LEAST_TRANSFER = 0.10
"""TraceML's limit for a warning (traceopt-ai/traceml, DIAGNOSIS.md)."""
LEAST_GAIN = 0.05
"""Of the step. Our choice: predictions are off by about as much."""
LEAST_OF_TRANSFER = 0.30
"""Our choice: what saves less of the reduction is not the buckets' fault."""
SHORT_STEP_MS = 10.0
"""Shorter steps are not judged: in a toy job the latency of each collective is most of the step."""
KNOBS = {
    "": "DistributedDataParallel(..., bucket_cap_mb={cap})",
    "lightning": "DDPStrategy(bucket_cap_mb={cap})",
    "transformers": "TrainingArguments(ddp_bucket_cap_mb={cap})",
    "accelerate": "DistributedDataParallelKwargs(bucket_cap_mb={cap})",
}


@rule(
    "DD804",
    "bucket-size",
    Severity.WARNING,
    "Another DDP bucket size would overlap more of the reduction with backward",
)
def check_buckets(state: SpeedState) -> Answer:
    """Report buckets that are so large or so small that gradients are reduced after backward and not during it.

    ## What it means

    DDP puts gradients into buckets and reduces a bucket as soon as its last gradient is ready. A bucket that holds most
    of the model leaves when backward is over, and nothing hides its reduction. By default that is so for models with
    less than 26 MiB of gradients. Very small buckets cost the latency of a collective each.

    ## How it is recognized

    The recorder notes when each gradient was ready, and DDP's buckets. The bandwidth is the one with which a simulation
    of these buckets gives the backward that was seen. The same simulation then tries other caps. Reported is the best
    one, if the reduction takes at least 10% of the step, and the cap saves about 30% of the reduction, and at least 5%
    of the step whatever the latency of a collective is. Of caps that save nearly as much, the one closest to DDP's
    default is named. Steps below 10 ms are not judged.

    ## How sure

    Medium: it is a prediction. The range is over the latency of a collective, which a run with few buckets does not
    tell. Where the ranks compute on most of the cores, the rule says that it cannot tell, because the reduction then
    takes cores from backward. With more than 40 buckets it still tells: fewer of them take less from backward.

    ## What to do

    Set `bucket_cap_mb`, or the option of the framework that builds the DDP model, to the value in the report. Compare
    the time of a step before and after.

    ## Example

    A model with 16 MiB of gradients over a network of 1 Gbit/s: with the default buckets half of the step is reduction.
    With `bucket_cap_mb=1` most of it runs during backward.
    """
    transfer_ms = mean(state.steps.transfer_ms["exposed"])
    models = reduced_models(state)
    if not models:
        return skipped("the times when gradients are ready were not recorded")
    if state.share(transfer_ms) < LEAST_TRANSFER or state.budget.wall_ms < SHORT_STEP_MS:
        return passed(f"the reduction of gradients takes {state.share(transfer_ms):.0%} of a step")
    if len(models) > 1:
        return unknown(f"the reductions of the {len(models)} DDP models cannot be distinguished")
    gradients = gather(list(models[0].times.values()))
    if gradients is None:
        return unknown("the ranks have different gradients")
    if reason := contested(state, gradients):
        return unknown(reason)
    return judged(_problems(state, models[0], gradients, transfer_ms))


def contested(state: SpeedState, gradients: BucketGradients | None) -> str:
    """Return why a prediction of another cap would not hold, or an empty string. With very many buckets it holds."""
    has_many = gradients is not None and len(gradients.bucket_bytes) > MANY_BUCKETS
    return "" if has_many else contention(state.ranks)


def _problems(state: SpeedState, model: ReducedModel, gradients: BucketGradients, transfer_ms: float) -> list[Problem]:
    networks = networks_of(gradients)
    if not networks:
        return []
    cap_bytes, saved = best_cap(gradients, networks, CAPS_BYTES)
    # The saving is predicted from a few backwards: compared with these, not with the mean of a busy machine.
    simulated_ms = min(transfer_ms, gradients.exposed_ms)
    if state.share(saved.low_ms) < LEAST_GAIN or saved.mid_ms < LEAST_OF_TRANSFER * simulated_ms:
        return []
    sizes, cap = gradients.bucket_bytes, f"{cap_bytes / MIB:g}"
    total = format_size(sum(sizes))
    count = f"{len(sizes)} buckets, the largest with {format_size(max(sizes))}" if len(sizes) > 1 else "one bucket"
    low, high = (min(one, transfer_ms) for one in (saved.low_ms, saved.high_ms))
    gain = state.share(min(saved.mid_ms, transfer_ms))
    return [
        Problem(
            summary=(
                f"gradient reduction that does not overlap with backward takes {state.share(transfer_ms):.0%} of the "
                f"step; another bucket size should save about {gain:.0%} of the step"
            ),
            evidence=(
                f"{total} of gradients are reduced in {count}",
                (
                    f"backward computes for {gradients.compute_end_ms:.3g} ms, and the reduction ends "
                    f"{gradients.exposed_ms:.3g} ms later"
                ),
                f"predicted for {cap} MiB: {state.share(low):.0%} to {state.share(high):.0%} less time per step",
            ),
            fix=knob(state, KNOBS).format(cap=cap),
            confidence=Confidence.MEDIUM,
            ranks=tuple(sorted(model.times)),
            where=built_at(state, model),
            share=gain,
        )
    ]
