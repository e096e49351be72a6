"""Messages between rank 0 and the process that computes the reference, each a line of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.reference import ReferenceStep
    from ddpdoctor.model.trial import TrialSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: what all steps have in common."""

    settings: TrialSettings
    world_size: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A step to compute. ``path`` is a file with the state before the step and the gradients that DDP left."""

    step: int
    path: str
    batches: tuple[str, ...]
    """The digest of each rank's batch, in rank order."""
    losses: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How the gradients compare. If they cannot be compared, ``step`` is None and ``problem`` says why."""

    step: ReferenceStep | None = None
    float64: bool = True
    batchnorm: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    problem: str = ""
