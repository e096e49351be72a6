"""Facts about a model that `check-consistency` trained for a few steps under DDP. No judgement.

Tensor names are those of the wrapped module, without ``module.``. Steps are counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import Consistency, What
    from ddpdoctor.model.facts import ModelSeen
    from ddpdoctor.model.reference import OneProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """The settings for all ranks. Functions are named ``package.module:name``, or "" if there is none."""

    model: str
    batch: str = ""
    step: str = ""
    steps: int = 5
    seed: int = 0
    backend: str = ""
    """Empty: chosen automatically."""
    reference: bool = False
    twice: bool = False
    """Run the steps a second time with the same seed, and compare bit by bit."""
    unused: bool = False
    """Pass ``find_unused_parameters=True`` to DDP."""
    allowed: tuple[str, ...] = ()
    """Name patterns of tensors that may differ between ranks."""
    limit_s: float = 120.0
    """The trial stops when no rank makes progress for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A rank and where it ran."""

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Whether a second run with the same seed gave the same bits on the same ranks."""

    steps: int
    """Number of steps that both runs made."""
    step: int | None = None
    """The step at which the first tensor differed, 0 for the initial model. None if everything was equal."""
    what: What | None = None
    name: str = ""
    part: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks on which it differed."""
    differing: int = 0
    """How many tensors differed at that step on the first of these ranks."""
    of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All results of a trial."""

    settings: TrialSettings
    participants: tuple[Participant, ...]
    models: tuple[ModelSeen, ...]
    """One per rank: the module passed to DDP's constructor."""
    optimizer: str = ""
    batch: str = ""
    """A description of a batch: "the user's make_batch", "float32[8, 16], made up for 0"."""
    loss: str = ""
    """A description of the loss."""
    consistency: Consistency | None = None
    """None if the models differ, because DDP was not tried then."""
    reference: OneProcess | None = None
    """None if it was not requested or not possible."""
    rerun: Rerun | None = None
    notes: tuple[str, ...] = ()
    """What a reader must know about how the trial was done."""
