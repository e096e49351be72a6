"""What was seen of a model that `check-consistency` trained for a few steps under DDP. No judgement.

Names of tensors are those of the wrapped module, without ``module.``. Steps are counted from 1.
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
    """What all ranks are to do. Functions are named as ``package.module:name``, "" where there is none."""

    model: str
    batch: str = ""
    step: str = ""
    steps: int = 5
    seed: int = 0
    backend: str = ""
    """Empty: to be chosen."""
    reference: bool = False
    twice: bool = False
    """The steps are run a second time with the same seed, and compared bit by bit."""
    unused: bool = False
    """DDP is given ``find_unused_parameters=True``."""
    allowed: tuple[str, ...] = ()
    """Patterns of names of tensors that may differ between ranks."""
    limit_s: float = 120.0
    """For how long no rank may get on."""


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
    """How many steps both runs made."""
    step: int | None = None
    """At which the first tensor differed, 0 for what was built; None where all was equal."""
    what: What | None = None
    name: str = ""
    part: str = ""
    ranks: tuple[int, ...] = ()
    """On which it differed."""
    differing: int = 0
    """How many tensors differed at that step on the first of them."""
    of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All that came of it."""

    settings: TrialSettings
    participants: tuple[Participant, ...]
    models: tuple[ModelSeen, ...]
    """By rank: what DDP's constructor is given."""
    optimizer: str = ""
    batch: str = ""
    """What a batch was, in words: "the user's make_batch", "float32[8, 16], made up for 0"."""
    loss: str = ""
    """What the loss was, in words."""
    consistency: Consistency | None = None
    """None where the models differ, so that DDP was not tried."""
    reference: OneProcess | None = None
    """None where it was not asked for, or could not be made."""
    rerun: Rerun | None = None
    notes: tuple[str, ...] = ()
    """What a reader must know of how it was done."""
