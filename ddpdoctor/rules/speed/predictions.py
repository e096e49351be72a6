"""What a setting is predicted to do to the step, from what the run recorded. A trial (`tune`) says what it really does.

A setting is named as a trial names it: "bucket_cap=BYTES", "accumulate=STEPS", "no_sync", "bf16_reduction",
"buffers_off", "find_unused_off", "unreduced".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.predictions import Bound, PredictedStep

from .contention import contention
from .curves import scaled_to
from .simulation import DEFAULT_BYTES, MIB, buckets_for, gather, networks_of, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.facts import Rank

    from .curves import MeasuredCurves
    from .simulation import BucketGradients, ReductionModel

RUN_ASSUMES = "the time of a bucket is its size over one bandwidth, which is fitted to this run"
CURVE_ASSUMES = "an all-reduce takes as long as allreduce-bench measured"
SCALED_ASSUMES = CURVE_ASSUMES + " with {measured} ranks, scaled to a ring of {ranks}"
HALF_ASSUMES = "float32 gradients; at best half the bytes, at worst no gain, because bf16 sums may be slower on CPUs"
CORES_ASSUMES = "the reductions also take cores from backward"
SAME_ASSUMES = "a backward without a reduction takes as long as its own computation"
HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBasis:
    """The present step as predictions need it."""

    step_ms: float
    gradients: BucketGradients | None
    """None: they were not recorded, or there are several models."""
    networks: tuple[ReductionModel, ...]
    """How long a bucket may take; empty if neither the run nor a curve tells."""
    assumes: str
    """What ``networks`` rest on."""
    exposed_ms: float
    """The reduction of a step that backward does not hide."""
    reductions: int = 1
    """In each step."""
    buffers_ms: float = 0.0
    """The transfer of buffers in a step."""
    cap_bytes: int | None = None
    """Of the buckets; None: DDP's default."""
    contested: str = ""
    """Why the reduction cannot be predicted: the ranks have no cores to spare."""


def basis_of(
    ranks: Sequence[Rank], step_ms: float, curves: MeasuredCurves | None = None, reductions: int = 1
) -> PredictionBasis:
    """Return what predictions go from.

    Args:
        ranks: The ranks of the job. Their gradients' times are those of the script's own settings.
        step_ms: The present step.
        curves: What ``allreduce-bench`` measured, which replaces the bandwidth solved from the run.
        reductions: Reductions in each step.
    """
    times = [rank.gradient_times[0] for rank in ranks if len(rank.gradient_times) == 1]
    gradients = gather(times) if times and len(times) == len(ranks) else None
    exposed_ms = reductions * gradients.exposed_ms if gradients is not None else 0.0
    basis = PredictionBasis(
        step_ms=step_ms,
        gradients=gradients,
        networks=networks_of(gradients) if gradients is not None else (),
        assumes=RUN_ASSUMES,
        exposed_ms=exposed_ms,
        reductions=reductions,
        cap_bytes=times[0].cap_bytes if times else None,
        contested=contention(ranks),
    )
    return basis if curves is None else _with_curves(basis, curves, len(ranks))


def predict_setting(basis: PredictionBasis, setting: str) -> PredictedStep | None:
    """Return the step under a setting, or why it cannot be predicted; None for a setting that no model describes."""
    name, _, value = setting.partition("=")
    if name == "bucket_cap":
        return _predict_cap(basis, setting, int(value))
    if name == "find_unused_off":
        return _predict_order(basis, setting)
    if name == "bf16_reduction":
        return _predict_half(basis, setting)
    if name == "buffers_off":
        return _saving(basis, setting, "no broadcast of buffers", basis.buffers_ms) if basis.buffers_ms else None
    if name in {"accumulate", "no_sync", "unreduced"}:
        return _predict_fewer(basis, setting, int(value or 0))
    return None


def _with_curves(basis: PredictionBasis, curves: MeasuredCurves, ranks: int) -> PredictionBasis:
    is_same = curves.mid.ranks == ranks
    assumes = CURVE_ASSUMES if is_same else SCALED_ASSUMES.format(measured=curves.mid.ranks, ranks=ranks)
    return replace(basis, networks=scaled_to(curves, ranks).all, assumes=assumes)


def _predict_cap(basis: PredictionBasis, setting: str, cap_bytes: int) -> PredictedStep:
    change = f"bucket_cap_mb={cap_bytes / MIB:g}"
    gradients, reason = basis.gradients, refusal_of(basis)
    if gradients is None or reason:
        return PredictedStep(setting=setting, change=change, reason=reason)
    ends = [simulate(gradients, buckets_for(gradients, cap_bytes), network) for network in basis.networks]
    return _ending(basis, setting, change, ends)


def _predict_order(basis: PredictionBasis, setting: str) -> PredictedStep | None:
    """Return the step with buckets in the order in which gradients are ready."""
    gradients = basis.gradients
    if gradients is None or not gradients.by_registration:
        return None
    change = "find_unused_parameters=False"
    if reason := refusal_of(basis):
        return PredictedStep(setting=setting, change=change, reason=reason)
    order = sorted(range(len(gradients.ready_ms)), key=gradients.ready_ms.__getitem__)
    by_ready = replace(
        gradients,
        sizes_bytes=tuple(gradients.sizes_bytes[i] for i in order),
        ready_ms=tuple(gradients.ready_ms[i] for i in order),
        by_registration=False,
    )
    cap_bytes = None if basis.cap_bytes == DEFAULT_BYTES else basis.cap_bytes
    ends = [simulate(by_ready, buckets_for(by_ready, cap_bytes), network) for network in basis.networks]
    return _ending(basis, setting, change, ends)


def _predict_half(basis: PredictionBasis, setting: str) -> PredictedStep:
    change = "gradients reduced in bf16"
    gradients, reason = basis.gradients, refusal_of(basis)
    if gradients is None or reason:
        return PredictedStep(setting=setting, change=change, reason=reason)
    halves = [_Halved(network=network) for network in basis.networks]
    ends = [simulate(gradients, gradients.bucket_bytes, network) for network in halves]
    return replace(_ending(basis, setting, change, [*ends, gradients.end_ms]), assumes=HALF_ASSUMES)


def _predict_fewer(basis: PredictionBasis, setting: str, steps: int) -> PredictedStep | None:
    """Return the step with fewer reductions, or none."""
    left = {"accumulate": 1 / max(1, steps), "no_sync": 1 / max(1, basis.reductions)}
    name = setting.partition("=")[0]
    saved_ms = basis.exposed_ms * (1 - left.get(name, 0.0))
    changes = {
        "accumulate": f"gradients reduced once per {steps} batches (no_sync)",
        "no_sync": f"no_sync() for {basis.reductions - 1} of {basis.reductions} backwards",
        "unreduced": "no reduction at all",
    }
    if not saved_ms:
        return None
    found = _saving(basis, setting, changes[name], saved_ms, assumes=SAME_ASSUMES)
    return replace(found, bound=Bound.AT_LEAST, assumes=CORES_ASSUMES) if basis.contested else found


def refusal_of(basis: PredictionBasis) -> str:
    """Return why changes of the reduction cannot be predicted, or ""."""
    if basis.contested:
        return basis.contested
    if basis.gradients is None:
        return "the times when gradients are ready were not recorded, or there are several models"
    return "" if basis.networks else "backward hides the reduction, so this run does not show the speed of the network"


def _ending(basis: PredictionBasis, setting: str, change: str, ends_ms: Sequence[float]) -> PredictedStep:
    """Return the step whose backwards end at one of these times."""
    present_ms = basis.gradients.end_ms if basis.gradients is not None else 0.0
    ratios = sorted(1 + basis.reductions * (end - present_ms) / basis.step_ms for end in ends_ms)
    return PredictedStep(
        setting=setting,
        change=change,
        ratio=ratios[len(ratios) // 2],
        low=ratios[0],
        high=ratios[-1],
        assumes=basis.assumes,
    )


def _saving(
    basis: PredictionBasis, setting: str, change: str, saved_ms: float, assumes: str = ""
) -> PredictedStep:  # fmt: skip
    """Return the step without a part of it."""
    ratio = max(0.0, 1 - saved_ms / basis.step_ms)
    return PredictedStep(setting=setting, change=change, ratio=ratio, low=ratio, high=ratio, assumes=assumes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Halved:
    """A network on which each bucket has half its bytes."""

    network: ReductionModel

    def time_ms(self, size_bytes: float) -> float:
        return self.network.time_ms(HALF * size_bytes)
