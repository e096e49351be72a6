"""What a setting is predicted to do to the step, from what the run recorded. A trial (`tune`) measures it.

A setting has the name that a trial gives it: "bucket_cap=BYTES", "accumulate=STEPS", "no_sync", "bf16_reduction",
"buffers_off", "find_unused_off", "unreduced".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, sqrt
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.tuning import Bound, PredictedSize, PredictedStep

from .input import predict_workers
from .reduction import (
    CAPS_BYTES,
    DEFAULT_BYTES,
    MIB,
    ReductionCost,
    best_cap,
    buckets_for,
    contention,
    gather,
    larger_costs,
    networks_of,
    scaled_to,
    simulate,
)
from .state import mean, usual

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.findings import Finding

    from .reduction import BucketGradients, LinkModel, MeasuredCurves
    from .state import SpeedState

# Parts of the step below this are not worth a prediction. Our choice: predictions are off by about as much.
LEAST_SHARE = 0.05
ACCUMULATED = 4  # our choice: over how many batches a step without accumulation is predicted to accumulate
# Kinds of findings whose fix is one of the settings here.
PREDICTED_ELSEWHERE = frozenset(
    {"input-bound", "bucket-size", "accumulation-sync", "communication-bound", "buffer-broadcast"}
)
FAULT_ASSUMES = "it goes away completely, and nothing else gets slower"
RUN_ASSUMES = "the time of a bucket is its size over one bandwidth, which is fitted to this run"
CURVE_ASSUMES = "an all-reduce takes as long as allreduce-bench measured"
SCALED_ASSUMES = CURVE_ASSUMES + " with {measured} ranks, scaled to a ring of {ranks}"
HALF_ASSUMES = "float32 gradients; at best half the bytes, at worst no gain, because bf16 sums may be slower on CPUs"
CORES_ASSUMES = "the reductions also take cores from backward"
SAME_ASSUMES = "a backward without a reduction takes as long as its own computation"
HALF = 0.5
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBasis:
    """The present step as predictions need it."""

    step_ms: float
    gradients: BucketGradients | None  # None: they were not recorded, or there are several models
    networks: tuple[LinkModel, ...]  # how long a bucket may take; empty if neither the run nor a curve tells
    assumes: str  # what ``networks`` rest on
    exposed_ms: float  # the reduction of a step that backward does not hide
    reductions: int = 1  # in each step
    buffers_ms: float = 0.0  # the transfer of buffers in a step
    cap_bytes: int | None = None  # of the buckets; None: DDP's default
    contested: str = ""  # why the reduction cannot be predicted: the ranks have no cores to spare

    @property
    def refusal(self) -> str:
        """Why changes of the reduction cannot be predicted, or ""."""
        if self.contested:
            return self.contested
        if self.gradients is None:
            return "the times when gradients are ready were not recorded, or there are several models"
        return (
            "" if self.networks else "backward hides the reduction, so this run does not show the speed of the network"
        )


def basis_of(
    ranks: Sequence[Rank], step_ms: float, curves: MeasuredCurves | None = None, reductions: int = 1
) -> PredictionBasis:
    """Return what predictions are based on: ``curves``, if given, replace the bandwidth solved from the run."""
    times = [rank.gradient_times[0] for rank in ranks if len(rank.gradient_times) == 1]
    gradients = gather(times) if times and len(times) == len(ranks) else None
    networks: tuple[LinkModel, ...] = networks_of(gradients) if gradients is not None else ()
    assumes = RUN_ASSUMES
    if curves is not None:
        networks, measured = scaled_to(curves, len(ranks)), curves[0].ranks
        is_same = measured == len(ranks)
        assumes = CURVE_ASSUMES if is_same else SCALED_ASSUMES.format(measured=measured, ranks=len(ranks))
    return PredictionBasis(
        step_ms=step_ms,
        gradients=gradients,
        networks=networks,
        assumes=assumes,
        exposed_ms=reductions * gradients.exposed_ms if gradients is not None else 0.0,
        reductions=reductions,
        cap_bytes=times[0].cap_bytes if times else None,
        contested=contention(ranks),
    )


def job_basis(state: SpeedState, curves: MeasuredCurves | None = None) -> PredictionBasis:
    """Return what predictions are based on, by the job's budget."""
    per_step = min((int(median(rank.reductions)) for rank in state.steps.ranks.values()), default=1)
    basis = basis_of(state.ranks, state.budget.wall_ms, curves, reductions=max(1, per_step))
    return replace(
        basis,
        exposed_ms=mean(state.steps.transfer_ms.get("exposed", ())),
        buffers_ms=usual(state.steps.transfer_ms.get("buffers", ())),
    )


def predict_changes(
    state: SpeedState, findings: Iterable[Finding] = (), curves: MeasuredCurves | None = None
) -> tuple[PredictedStep, ...]:
    """Return what changes would do to the step of a job, the largest gain first; those that were refused come last."""
    if state.is_small():
        return ()
    basis = job_basis(state, curves)
    settings = []
    if state.share(basis.exposed_ms) >= LEAST_SHARE:
        cap = CAPS_BYTES[0]
        if basis.gradients is not None and basis.networks:
            cap = best_cap(basis.gradients, basis.networks)[0]
        fewer = "no_sync" if basis.reductions > 1 else f"accumulate={ACCUMULATED}"
        settings = [f"bucket_cap={cap}", fewer, "bf16_reduction", "find_unused_off"]
    if state.share(basis.buffers_ms) >= LEAST_SHARE:
        settings.append("buffers_off")
    predicted = [*(predict_setting(basis, setting) for setting in settings), predict_workers(state)]
    for finding in findings:
        if finding.share is not None and finding.kind not in PREDICTED_ELSEWHERE:
            # What remains of the fault, or comes to light behind it, is not known.
            ratio = 1 - finding.share
            predicted.append(PredictedStep(
                setting=f"without={finding.kind}", change=f"{finding.kind} ({finding.code}) fixed",
                ratio=ratio, low=ratio, high=1.0, bound=Bound.UP_TO, assumes=FAULT_ASSUMES,
            ))  # fmt: skip
    return tuple(sorted(filter(None, predicted), key=lambda step: (step.ratio is None, -step.gain)))


def predict_setting(basis: PredictionBasis, setting: str) -> PredictedStep | None:
    """Return the step under a setting, or why it cannot be predicted; None for a setting that no model describes."""
    name, _, value = setting.partition("=")
    gradients, networks = basis.gradients, basis.networks
    number = int(value) if value.isdigit() else 0
    if name in {"accumulate", "no_sync", "unreduced"}:
        change, left = {
            "accumulate": (f"gradients reduced once per {number} batches (no_sync)", 1 / max(1, number)),
            "no_sync": (
                f"no_sync() for {basis.reductions - 1} of {basis.reductions} backwards", 1 / max(1, basis.reductions)
            ),
            "unreduced": ("no reduction at all", 0.0),
        }[name]  # fmt: skip
        saved = _saving(basis, setting, change, basis.exposed_ms * (1 - left), SAME_ASSUMES)
        if saved is None or not basis.contested:
            return saved
        return replace(saved, bound=Bound.AT_LEAST, assumes=CORES_ASSUMES)
    if name == "buffers_off":
        return _saving(basis, setting, "no broadcast of buffers", basis.buffers_ms)
    if name == "find_unused_off" and (gradients is None or not gradients.by_registration):
        return None
    changes = {
        "bucket_cap": f"bucket_cap_mb={number / MIB:g}",
        "find_unused_off": "find_unused_parameters=False",
        "bf16_reduction": "gradients reduced in bf16",
    }
    if name not in changes:
        return None
    if gradients is None or basis.refusal:
        return PredictedStep(setting=setting, change=changes[name], reason=basis.refusal)
    assumes = basis.assumes
    cap: int | None = number
    if name == "find_unused_off":
        order = sorted(range(len(gradients.ready_ms)), key=gradients.ready_ms.__getitem__)
        gradients = replace(
            gradients, by_registration=False, sizes_bytes=tuple(gradients.sizes_bytes[i] for i in order),
            ready_ms=tuple(gradients.ready_ms[i] for i in order),
        )  # fmt: skip
        cap = None if basis.cap_bytes == DEFAULT_BYTES else basis.cap_bytes
    if name == "bf16_reduction":
        ends = [simulate(gradients, gradients.bucket_bytes, network, sent=HALF) for network in networks]
        ends.append(gradients.end_ms)
        assumes = HALF_ASSUMES
    else:
        ends = [simulate(gradients, buckets_for(gradients, cap), network) for network in networks]
    ratios = sorted(1 + basis.reductions * (end - gradients.end_ms) / basis.step_ms for end in ends)
    return PredictedStep(
        setting=setting, change=changes[name], ratio=ratios[len(ratios) // 2], low=ratios[0], high=ratios[-1],
        assumes=assumes,
    )  # fmt: skip


def _saving(
    basis: PredictionBasis, setting: str, change: str, saved_ms: float, assumes: str = ""
) -> PredictedStep | None:
    """Return the step without a part of it, or None if that part takes no time."""
    ratio = max(0.0, 1 - saved_ms / basis.step_ms)
    predicted = PredictedStep(setting=setting, change=change, ratio=ratio, low=ratio, high=ratio, assumes=assumes)
    return predicted if saved_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize:
    """The largest job that was run."""

    ranks: int
    step_ms: float
    efficiency: float
    spread_ms: float  # sigma: standard deviation of a rank's own time


def predict_sizes(
    basis: PredictionBasis, measured: MeasuredSize, sizes: Sequence[int] = SIZES
) -> tuple[PredictedSize, ...]:
    """Return the step for each larger number of ranks, with the batch per rank of the measured job. Never a finding.

    Empty if the speed of the network is unknown.
    """
    gradients = basis.gradients
    networks = [cost for cost in basis.networks if isinstance(cost, ReductionCost)]
    if gradients is None or not networks:
        return ()

    def end_ms(network: ReductionCost) -> float:
        return simulate(gradients, gradients.bucket_bytes, network)

    found = []
    for ranks in (size for size in sizes if size > measured.ranks):
        waiting_ms = waiting_of(measured.spread_ms, ranks)
        rest_ms = measured.step_ms + waiting_ms - waiting_of(measured.spread_ms, measured.ranks)
        steps = [
            max(0.0, basis.reductions * (end_ms(cost) - end_ms(network))) + rest_ms
            for network in networks
            for cost in larger_costs(network, measured.ranks, ranks)
        ]
        low_ms, high_ms, work_ms = min(steps), max(steps), measured.efficiency * measured.step_ms
        found.append(PredictedSize(
            ranks=ranks, low_ms=low_ms, high_ms=high_ms, waiting_ms=waiting_ms, low=work_ms / high_ms,
            high=work_ms / low_ms,
        ))  # fmt: skip
    return tuple(found)


def waiting_of(spread_ms: float, ranks: int) -> float:
    """Return how far the slowest of so many ranks is beyond the mean, at most: sigma * sqrt(2 ln N)."""
    return spread_ms * sqrt(2 * log(ranks))
