"""What rank 0 and the process that computes the reference say to each other, a line of JSON each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.reference import ReferenceStep
    from ddpdoctor.model.trial import TrialSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What all steps have in common."""

    settings: TrialSettings
    world_size: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A step. ``path``: a file of tensors, the state before it and the gradients that DDP left."""

    step: int
    path: str
    batches: tuple[str, ...]
    """By rank: the digest of its batch."""
    losses: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How the gradients compare; no step, and a problem, where they cannot be compared."""

    step: ReferenceStep | None = None
    float64: bool = True
    batchnorm: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    problem: str = ""
