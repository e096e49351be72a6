"""How DDP's gradient was seen to stand to that of one process on the whole batch. No judgement.

Errors are Euclidean norms of differences of a parameter's gradient, over all its elements, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientErrors:
    """One parameter's gradient in DDP, D, beside those of one process.

    W is that of the whole batch, P the mean over ranks of those of each rank's batch by itself, L that of rank 0's.
    """

    name: str
    elements: int
    norm: float
    """Of W."""
    ddp_norm: float
    rounding: float
    """What rounding makes of such a gradient: the largest difference between computing it in its own precision and in
    float64, over the whole batch and each rank's part; where float64 could not be had, over the order of samples."""
    exact: float
    """The same for W against P, both of which are in float64 where that could be had."""
    whole: float
    """D - W."""
    parts: float
    """D - P."""
    local: float
    """D - L."""
    scaled: float
    """D - k P, with ``ReferenceStep.scale`` for k."""
    maths: float
    """W - P: what the averaging of ranks changes, whatever DDP does."""
    weighted: float
    """W - the sum of each rank's gradient times its weight in ``ReferenceStep.weights``."""
    without_batchnorm: float | None
    """W - P with the batch statistics of BatchNorm turned off in both; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step, from the state that DDP's replicas were in."""

    step: int
    scale: float
    """k for which k P is closest to D; 0 where P is 0."""
    weights: tuple[float, ...]
    """By rank: those with which the gradients of the ranks' batches are closest to W."""
    samples: tuple[int, ...]
    """By rank: in its batch."""
    losses: tuple[float | None, ...]
    """By rank, in DDP."""
    part_losses: tuple[float | None, ...]
    """By rank: of its batch in one process."""
    random_error: float
    """The largest difference, in units of rounding, that other random numbers make to W."""
    tensors: tuple[GradientErrors, ...]
    missing: tuple[str, ...] = ()
    """Parameters that have a gradient on one side only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProcess:
    """All steps that were compared, and what the model has that bears on it."""

    steps: tuple[ReferenceStep, ...] = ()
    float64: bool = True
    """The rounding was measured against float64."""
    batchnorm: tuple[str, ...] = ()
    """Modules that take statistics of the batch of their own rank."""
    hooked: tuple[str, ...] = ()
    """Parameters with hooks on their gradients, which the model's builder put there."""
    dropout: int = 0
    """Layers of which the dropout was set to 0 for this."""
    problem: str = ""
    """Why nothing, or not all, could be compared: a sentence."""
