"""Facts about a model that `check-consistency` trained for a few steps, under DDP and in one process.

Tensor names are those of the wrapped module, without ``module.``. Steps are counted from 1. Errors are Euclidean norms
of differences of a parameter's gradient, over all its elements, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import Consistency, What
    from ddpdoctor.model.facts import ModelSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """The settings for all ranks. Functions are named ``package.module:name``, or "" if there is none."""

    model: str
    batch: str = ""
    step: str = ""
    steps: int = 5
    seed: int = 0
    backend: str = ""  # empty: chosen automatically
    reference: bool = False
    twice: bool = False  # run the steps a second time with the same seed, and compare bit by bit
    unused: bool = False  # pass ``find_unused_parameters=True`` to DDP
    allow_different: tuple[str, ...] = ()  # name patterns of tensors that may differ between ranks
    limit_s: float = 120.0  # the trial stops when no rank makes progress for this long


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

    steps: int  # number of steps that both runs made
    step: int | None = None  # at which the first tensor differed, 0 for the initial model
    what: What | None = None
    name: str = ""
    part: str = ""
    ranks: tuple[int, ...] = ()  # the ranks on which it differed
    differing: int = 0  # how many tensors differed at that step on the first of these ranks
    of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All results of a trial."""

    settings: TrialSettings
    participants: tuple[Participant, ...]
    models: tuple[ModelSeen, ...]  # one per rank: the module passed to DDP's constructor
    optimizer: str = ""
    batch: str = ""  # a description of a batch: "the user's make_batch", "float32[8, 16], made up for 0"
    loss: str = ""  # a description of the loss
    consistency: Consistency | None = None  # None if the models differ, because DDP was not tried then
    reference: OneProcess | None = None  # None if it was not requested or not possible
    rerun: Rerun | None = None
    notes: tuple[str, ...] = ()  # what a reader must know about how the trial was done


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientErrors:
    """One parameter's gradient D in DDP, compared with gradients of a single process.

    W is the gradient of the whole batch. P is the mean of the gradients of each rank's batch. L is that of rank 0's
    batch.
    """

    name: str
    elements: int
    norm: float  # norm of W
    ddp_norm: float
    # The rounding error of such a gradient: the largest difference between its own precision and float64, over the
    # whole batch and each rank's part. If float64 is not available: the largest difference between sample orders.
    rounding: float
    exact: float  # The rounding error of W - P. Both are computed in float64 if it is available.
    whole: float  # D - W
    parts: float  # D - P
    local: float  # D - L
    scaled: float  # D - k P, with ``ReferenceStep.scale`` for k
    maths: float  # W - P: the change that comes from averaging over ranks, independent of DDP
    weighted: float  # W minus the sum of the ranks' gradients, weighted with ``ReferenceStep.weights``
    without_batchnorm: float | None  # W - P with BatchNorm's batch statistics off in both


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step that starts from the state of DDP's replicas."""

    step: int
    scale: float  # the factor k for which k P is closest to D, or 0 if P is 0
    weights: tuple[float, ...]  # one per rank: the weights with which the sum of the ranks' gradients is closest to W
    samples: tuple[int, ...]  # samples in each rank's batch
    losses: tuple[float | None, ...]  # each rank's loss in DDP
    part_losses: tuple[float | None, ...]  # the loss of each rank's batch in one process
    random_error: float  # the largest change of W with other random numbers, in units of rounding
    tensors: tuple[GradientErrors, ...]
    missing: tuple[str, ...] = ()  # parameters that have a gradient only in DDP or only in one process


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProcess:
    """All compared steps, and the properties of the model that affect the comparison."""

    steps: tuple[ReferenceStep, ...] = ()
    float64: bool = True  # the rounding was measured against float64
    batchnorm: tuple[str, ...] = ()  # modules that compute batch statistics on their own rank only
    hooked: tuple[str, ...] = ()  # parameters whose gradients have hooks from the code that builds the model
    dropout: int = 0  # number of layers whose dropout was set to 0 for this comparison
    problem: str = ""  # a sentence that says why the comparison is missing or incomplete
