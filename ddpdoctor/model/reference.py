"""A comparison of DDP's gradients with those of one process on the whole batch. No judgement.

Errors are Euclidean norms of differences of a parameter's gradient, over all its elements, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientErrors:
    """One parameter's gradient D in DDP, compared with gradients of a single process.

    W is the gradient of the whole batch. P is the mean of the gradients of each rank's batch. L is that of rank 0's
    batch.
    """

    name: str
    elements: int
    norm: float
    """Norm of W."""
    ddp_norm: float
    rounding: float
    """The rounding error of such a gradient: the largest difference between its own precision and float64, over the
    whole batch and each rank's part. If float64 is not available: the largest difference between sample orders."""
    exact: float
    """The rounding error of W - P. Both are computed in float64 if it is available."""
    whole: float
    """D - W."""
    parts: float
    """D - P."""
    local: float
    """D - L."""
    scaled: float
    """D - k P, with ``ReferenceStep.scale`` for k."""
    maths: float
    """W - P: the change that comes from averaging over ranks, independent of DDP."""
    weighted: float
    """W minus the sum of the ranks' gradients, weighted with ``ReferenceStep.weights``."""
    without_batchnorm: float | None
    """W - P with the batch statistics of BatchNorm turned off in both, or None without BatchNorm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step that starts from the state of DDP's replicas."""

    step: int
    scale: float
    """The factor k for which k P is closest to D, or 0 if P is 0."""
    weights: tuple[float, ...]
    """One per rank: the weights with which the sum of the ranks' gradients is closest to W."""
    samples: tuple[int, ...]
    """Samples in each rank's batch."""
    losses: tuple[float | None, ...]
    """Each rank's loss in DDP."""
    part_losses: tuple[float | None, ...]
    """The loss of each rank's batch in one process."""
    random_error: float
    """The largest change of W with other random numbers, in units of rounding."""
    tensors: tuple[GradientErrors, ...]
    missing: tuple[str, ...] = ()
    """Parameters that have a gradient only in DDP or only in one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProcess:
    """All compared steps, and the properties of the model that affect the comparison."""

    steps: tuple[ReferenceStep, ...] = ()
    float64: bool = True
    """The rounding was measured against float64."""
    batchnorm: tuple[str, ...] = ()
    """Modules that compute batch statistics on their own rank only."""
    hooked: tuple[str, ...] = ()
    """Parameters whose gradients have hooks from the code that builds the model."""
    dropout: int = 0
    """Number of layers whose dropout was set to 0 for this comparison."""
    problem: str = ""
    """A sentence that says why the comparison is missing or incomplete."""
