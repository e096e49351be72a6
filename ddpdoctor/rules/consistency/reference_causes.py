"""Why DDP's gradient is not that of one process: the gradient that it does equal shows the cause."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import first_names
from ddpdoctor.rules.answers import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.model.trial import GradientErrors, OneProcess, ReferenceStep

LIMIT = 10.0
"""Our choice: an error of up to this many times the rounding error counts as none. Rounding errors of two computations
of one gradient differ by small factors; real faults are wrong by a factor of hundreds or more."""
NEAR = 1e-3
"""Our choice: how near a factor must be to the world size to be reported as the world size."""
MAX_NAMES = 4
"""How many modules or parameters a sentence names. Our choice."""


def ratio(error: float, allowed: float) -> float:
    """Return an error as a multiple of the allowed one; 0 for no error."""
    return error / allowed if error and allowed else math.inf if error else 0.0


def explain(reference: OneProcess, step: ReferenceStep) -> Problem:
    """Return why a step's gradient is not that of one process: the first cause that explains all parameters."""
    tests: tuple[Callable[[OneProcess, ReferenceStep], Problem | None], ...] = (
        _missing,
        _local,
        _scaled,
        _partly_local,
        _batchnorm,
        _weighted,
    )
    for test in tests:
        found = test(reference, step)
        if found is not None:
            return found
    return _unknown(step)


def _agree(tensors: Iterable[GradientErrors], error: str, allowed: str = "rounding") -> bool:
    return all(ratio(getattr(one, error), getattr(one, allowed)) <= LIMIT for one in tensors)


def _missing(_: OneProcess, step: ReferenceStep) -> Problem | None:
    if not step.missing:
        return None
    return Problem(
        summary=f"{', '.join(step.missing[:MAX_NAMES])} {'has' if len(step.missing) == 1 else 'have'} a gradient on "
        "one side only",
        fix="use the same parameters in forward for every batch and every number of ranks",
    )


def _local(_: OneProcess, step: ReferenceStep) -> Problem | None:
    """Return the cause if DDP's gradient is that of rank 0's batch alone."""
    if _agree(step.tensors, "parts") or not _agree(step.tensors, "local"):
        return None
    return Problem(
        summary="it equals the gradient of rank 0's own batch, so gradients were not reduced at all",
        fix="run the forward and backward of the last batch before step() outside no_sync(), and call the model that "
        "is passed to the step, not its .module",
    )


def _partly_local(_: OneProcess, step: ReferenceStep) -> Problem | None:
    """Return the cause if some parameters have rank 0's gradient, and the others the mean over ranks."""
    local = [one for one in step.tensors if ratio(one.parts, one.rounding) > LIMIT]
    rest = [one for one in step.tensors if one not in local]
    if not local or not rest or not _agree(local, "local"):
        return None
    names = ", ".join(one.name for one in local[:MAX_NAMES])
    return Problem(
        summary=f"{len(local)} of {len(step.tensors)} parameters have the gradient of rank 0's own batch, such as "
        f"{names}: they were not reduced",
        fix="train only parameters that DDP knows: wrap the model when it is complete and unfrozen",
    )


def _scaled(reference: OneProcess, step: ReferenceStep) -> Problem | None:
    """Return the cause if DDP's gradient is a multiple of the mean over ranks."""
    if _agree(step.tensors, "parts") or not _agree(step.tensors, "scaled"):
        return None
    world = len(step.samples)
    factor = _factor_words(step.scale, world)
    losses = [(one, part) for one, part in zip(step.losses, step.part_losses, strict=True) if one and part]
    by_loss = bool(losses) and all(math.isclose(one, step.scale * part, rel_tol=NEAR) for one, part in losses)
    if by_loss:
        return Problem(
            summary=(
                f"it is {factor} the mean over ranks, and so is the loss: the loss is scaled, but DDP already takes "
                "the mean"
            ),
            fix="return the same loss as in one process: DDP divides by the world size",
            evidence=(f"the loss of rank 0 is {step.losses[0]:.6g} in DDP, {step.part_losses[0]:.6g} in one process",),
        )
    hooks = reference.hooked[:MAX_NAMES]
    by_hand = f", perhaps by the hooks on {', '.join(hooks)}" if hooks else ""
    return Problem(
        summary=f"it is {factor} the mean over ranks, and the loss is not scaled: the script reduces or scales "
        f"gradients again{by_hand}",
        fix="leave the reduction to DDP: remove any all_reduce of gradients or of the loss before backward",
    )


def _batchnorm(reference: OneProcess, step: ReferenceStep) -> Problem | None:
    """Return the cause if the ranks' parts add up to the whole once BatchNorm takes no batch statistics."""
    known = [one for one in step.tensors if one.without_batchnorm is not None]
    same = all(ratio(one.without_batchnorm or 0.0, one.exact) <= LIMIT for one in known)
    if not reference.batchnorm or not known or not same or not _agree(step.tensors, "parts"):
        return None
    return Problem(
        summary=f"BatchNorm uses the statistics of each rank's own batch in {first_names(reference.batchnorm)}",
        fix="on GPUs, call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP; or keep BatchNorm if the "
        "batch per rank is large enough",
        severity=Severity.WARNING,
        evidence=("with the running statistics of BatchNorm, the gradients are equal",),
    )


def _weighted(_: OneProcess, step: ReferenceStep) -> Problem | None:
    """Return the cause if one process gives the ranks' parts other weights than DDP, which weights all alike."""
    if not _agree(step.tensors, "parts") or not _agree(step.tensors, "weighted", "exact"):
        return None
    world = len(step.weights)
    if all(abs(weight - 1) <= NEAR for weight in step.weights):
        return Problem(
            summary=(
                f"it is 1/{world} of the expected one: the loss is a sum over samples, and DDP takes the mean over "
                f"{world} ranks"
            ),
            fix=f"return the mean over samples, or multiply the sum by the world size ({world})",
        )
    if max(step.weights) - min(step.weights) <= NEAR:
        factor = step.weights[0] * world
        return Problem(
            summary=f"one process gets {factor:.4g} times the mean over ranks: the loss is not a mean over samples",
            fix="return a loss that is a mean over samples",
        )
    shares = ", ".join(f"{weight:.3g}" for weight in step.weights[:8]) + (", ..." if world > 8 else "")
    uneven = len(set(step.samples)) > 1
    return Problem(
        summary=(
            "it is a mean of means: in one process the ranks' parts have different weights, but DDP weights them "
            "equally"
        ),
        fix="divide the sum of the loss by the number of samples or tokens of all ranks (all_reduce the count), times "
        "the world size",
        evidence=(
            f"weights of the ranks' parts in one process: {shares}; in DDP {1 / world:.3g} each",
            f"samples by rank: {', '.join(map(str, step.samples[:8]))}"
            if uneven
            else "all ranks have the same number of samples: a mask, padding or class weights change how many count",
        ),
    )


def _unknown(step: ReferenceStep) -> Problem:
    right = _agree(step.tensors, "parts")
    seen = (
        "DDP's gradient is the mean over the ranks' batches: the reduction is correct, but the loss of the whole "
        "batch is not the mean of the ranks' losses"
        if right
        else "DDP's gradient is not the mean over the ranks' batches: check the reduction, a communication hook, and "
        "code that depends on the rank or the world size"
    )
    return Problem(
        summary="the reason is unknown",
        fix="look for code that mixes the samples of a batch (contrastive losses, batch normalization), branches on "
        "the rank, and hooks on gradients",
        confidence=Confidence.MEDIUM,
        evidence=(seen,),
    )


def _factor_words(scale: float, world: int) -> str:
    if abs(scale - world) <= NEAR * world:
        return f"{world} times (the world size)"
    if abs(scale * world - 1) <= NEAR:
        return f"1/{world} of (one over the world size)"
    return f"{scale:.6g} times"
