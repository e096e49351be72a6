"""Compares DDP's gradients with those of one process, parameter by parameter, and with the error of rounding.

Everything is computed in float64 on the host. Memory: one gradient of the model for the whole batch and one for each
rank's part, all of that twice.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.trial import GradientErrors, ReferenceStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.probes.consistency.reference_process import Question

    Named = Mapping[str, Any]

FLOOR_ULPS = 8.0
"""Our choice: the least rounding error of a gradient, in units in the last place of its norm. The order in which ranks
are summed is worth about one. A parameter with few elements may be exact by chance in one computation."""
EXACT_SHARE = 1e-6
"""Our choice: we take float64's error to be 1e-6 of float32's rounding. Their digits would give 2**-29 = 2e-9."""
UNSURE_SHARE = 1e-2
"""Our choice: if the order of samples alone changes a gradient by more than this share, it is not rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients from one state in one precision: of the whole batch, and of each rank's part of it."""

    whole: Named
    parts: tuple[Named, ...]


def compare_gradients(  # noqa: PLR0913 - each is one computation of the same gradient
    *,
    question: Question,
    ddp: Named,
    plain: Gradients,
    double: Gradients | None,
    other_numbers: Named,
    reordered: Named,
    still: Gradients | None,
    samples: tuple[int, ...],
    part_losses: tuple[float | None, ...],
) -> ReferenceStep:
    """Return a step's comparison. ``double`` is None without float64, and ``still`` (eval mode) without BatchNorm."""
    best = double or plain
    names = [name for name in best.whole if name in ddp and all(name in part for part in best.parts)]
    mean = {name: _mean(best.parts, name) for name in names}
    held = {name: ddp[name].double() for name in names}
    weights = _weights([{n: part[n] for n in names} for part in best.parts], {n: best.whole[n] for n in names})
    scale = _ratio(_dot(held, mean), _dot(mean, mean))
    rounding = _roundings(names, plain, double, reordered, ddp)
    rows = []
    for name in names:
        exact = rounding[name] if double is None else _exact(rounding[name], double.whole[name], reordered[name])
        row = _compare(name, held[name], best, scale=scale, weights=weights, rounding=rounding[name], exact=exact)
        off = None if still is None else _norm(still.whole[name] - _mean(still.parts, name))
        rows.append(replace(row, without_batchnorm=off))
    noise = [_norm(best.whole[n] - other_numbers[n]) / rounding[n] for n in names if n in other_numbers]
    return ReferenceStep(
        step=question.step,
        scale=scale,
        weights=weights,
        samples=samples,
        losses=question.losses,
        part_losses=part_losses,
        random_error=max(noise, default=0.0),
        tensors=tuple(rows),
        missing=tuple(sorted({*best.whole} ^ {*ddp}))[:8],
    )


def _compare(  # noqa: PLR0913 - what all parameters have in common, and what each has
    name: str,
    held: Any,
    best: Gradients,
    *,
    scale: float,
    weights: Sequence[float],
    rounding: float,
    exact: float,
) -> GradientErrors:
    whole, parts, mean = best.whole[name], [part[name] for part in best.parts], _mean(best.parts, name)
    return GradientErrors(
        name=name,
        elements=whole.numel(),
        norm=_norm(whole),
        ddp_norm=_norm(held),
        rounding=rounding,
        exact=exact,
        whole=_norm(held - whole),
        parts=_norm(held - mean),
        local=_norm(held - parts[0]),
        scaled=_norm(held - scale * mean),
        maths=_norm(whole - mean),
        weighted=_norm(whole - sum(weight * part for weight, part in zip(weights, parts, strict=True))),
        without_batchnorm=None,
    )


def _roundings(
    names: Sequence[str], plain: Gradients, double: Gradients | None, reordered: Named, ddp: Named
) -> dict[str, float]:
    """Return the norm of the rounding error of each parameter's gradient."""
    own = {name: _own_rounding(name, plain, double, reordered) for name in names}
    norms = {name: _norm((double or plain).whole[name]) for name in names}
    # A gradient that is all rounding, such as a bias before BatchNorm, says nothing about the others.
    shares = [own[name] / norms[name] for name in names if norms[name] > own[name]]
    typical = statistics.median(shares) if shares else 0.0
    return {
        name: max(own[name], norms[name] * max(typical, FLOOR_ULPS * _epsilon(ddp[name])), math.ulp(0.0))
        for name in names
    }


def _own_rounding(name: str, plain: Gradients, double: Gradients | None, reordered: Named) -> float:
    if double is None:
        # Without float64, compare with the same sum in another order.
        error = _norm(plain.whole[name] - reordered[name])
        return min(error, UNSURE_SHARE * _norm(plain.whole[name]))
    pairs = [(plain.whole, double.whole), *zip(plain.parts, double.parts, strict=True)]
    return max(_norm(one[name] - other[name]) for one, other in pairs)


def _exact(rounding: float, whole: Any, reordered: Any) -> float:
    """Return how precisely float64 gradients of the whole batch and of its parts can be compared."""
    return min(rounding, max(EXACT_SHARE * rounding, _norm(whole - reordered)))


def _weights(parts: Sequence[Named], whole: Named) -> tuple[float, ...]:
    """Return the weights that bring the parts' gradients closest to the whole batch's, by least squares."""
    import torch

    gram = torch.tensor([[_dot(one, other) for other in parts] for one in parts], dtype=torch.float64)
    aims = torch.tensor([_dot(one, whole) for one in parts], dtype=torch.float64)
    if not bool(torch.isfinite(gram).all() and torch.isfinite(aims).all()):
        return (math.nan,) * len(parts)
    # With the pseudo-inverse, equal parts share their weight.
    solved = torch.linalg.pinv(gram, hermitian=True) @ aims
    return tuple(float(weight) for weight in solved)


def _mean(parts: Sequence[Named], name: str) -> Any:
    return sum(part[name] for part in parts) / len(parts)


def _dot(one: Named, other: Named) -> float:
    return float(sum((one[name] * other[name]).sum() for name in one))


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _norm(tensor: Any) -> float:
    return float(tensor.norm())


def _epsilon(tensor: Any) -> float:
    import torch

    return float(torch.finfo(tensor.dtype).eps)
