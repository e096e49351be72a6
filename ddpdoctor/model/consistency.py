"""What was seen of the states of replicas: where ranks differ, and of gradients that are no numbers. No judgement.

Ranks write 16 bytes a tensor at the same moments of training; whoever can read the records of several ranks compares
them. Names are those of the wrapped module, without ``module.``. Steps are counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame


MESH = "mesh "
"""What the group of a stream begins with where it is no process group, but dimensions of a device mesh."""


class What(str, Enum):
    """What a tensor is."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    """As the optimizer was given it: after the reduction, and after what the script did to it."""
    BUFFER = "buffer"
    STATE = "optimizer state"


class StreamClock(str, Enum):
    """By what the moments are numbered at which ranks write down their state."""

    STEP = "optimizer step"
    """Right before (gradients) and after (all else) step N of an optimizer that holds parameters of the model."""
    FORWARD = "forward"
    """At the forward before which N backwards were reduced, where no optimizer of torch holds the parameters."""
    SYNC = "sync of buffers"
    """Right after DDP has sent rank 0's buffers, in the forward before which N backwards were reduced."""
    END = "end"
    """When training was over; N backwards had been reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """A tensor of which ranks write 16 bytes each time."""

    what: What
    name: str
    part: str = ""
    """Of optimizer state: which, as ``exp_avg``."""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What a rank wrote beside its tensors at one moment."""

    rank: int
    steps: int
    """Steps of this optimizer so far; 0 where there is none."""
    reductions: int
    """Backwards of this model so far whose gradients DDP has reduced."""
    forwards: int
    """Forwards of DDP with gradients since the step before, with or without a reduction."""
    unreduced_forwards: int
    """How many of those were under ``no_sync``."""
    settings: tuple[tuple[str, str], ...] = ()
    """Of the optimizer, by group: ("lr", "0.1"), ("1.weight_decay", "0.01")."""
    optimizer: str = ""
    """Class of the optimizer."""
    scale: float | None = None
    """Of the gradient scaler, where there is one."""
    random: str = ""
    """A digest of torch's random state on this rank."""
    dropout: bool = False
    """The model trains with dropout."""
    unreduced: tuple[str, ...] = ()
    """The first parameters that train and that DDP does not reduce: added, replaced or unfrozen after wrapping."""
    unfinished: tuple[str, ...] = ()
    """The first parameters whose gradients DDP still waited for at this step: it had not reduced all."""
    stray: int = 0
    """Tensors that the optimizers of this process hold and that are no parameters of any DDP model."""
    unheld: int = 0
    """Parameters of the model that train and that no optimizer of this process holds."""
    replaced: tuple[str, ...] = ()
    """The first of those for each of which an optimizer holds a stray tensor of equal shape that never had a
    gradient."""
    untrained: tuple[str, ...] = ()
    """The first parameters that get gradients, are in no optimizer of this process, and did not change at the last
    moments; those that ``late`` counts come first."""
    untrained_count: int = 0
    late: int = 0
    """How many of these a module was given only after the optimizer had been made."""
    own_steps: int = 0
    """Of a model that no DDP holds: steps right after a backward that reached no DDP model."""
    through: int = 0
    """Of such a model: backwards that reached a DDP model through it."""
    join: bool = False
    """Inside DDP's ``join``: ranks may take different numbers of steps."""
    hook: str = ""
    """The communication hook that the script registered."""
    site: Frame | None = None
    """The user's line that made the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One tensor of which ranks hold different contents."""

    row: TensorRow
    sides: tuple[tuple[int, ...], ...]
    """Ranks with equal contents, the most ranks first; among equally many the lowest rank first."""
    absent_on: tuple[int, ...] = ()
    """Ranks that have no such tensor, as a gradient of None. They are a side as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first moment at which tensors of one kind were seen to differ."""

    what: What
    number: int
    """Of the moment, by the clock of its stream."""
    last_equal: int | None
    """The last moment before it at which all tensors of this kind were equal; None where there was none."""
    splits: tuple[Split, ...]
    """The first tensors that differ, in the order of the model."""
    differing: int
    """How many differ in all."""
    of: int
    """How many of this kind were compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The states of one model, seen again and again by one clock."""

    clock: StreamClock
    group: str
    """Name of the process group in which the replicas are kept equal; of a device mesh ``MESH`` and its dimensions."""
    model: int
    """The how-many-th DDP model of this group, from 1; below 0 for what an optimizer trains and no DDP holds."""
    optimizer: int
    """The how-many-th optimizer that was seen to step with parameters of it, from 1; 0 where there is none."""
    ranks: tuple[int, ...]
    """Whose records were compared."""
    compared: int
    """At how many moments."""
    last_number: int | None
    """The last of them."""
    tensors: int = 0
    """How many there were at that moment, on the lowest of its ranks."""
    kinds: tuple[What, ...] = ()
    """Of which kinds there were tensors to be compared."""
    differences: tuple[Difference, ...] = ()
    """At most one of each kind."""
    values: tuple[tuple[int, tuple[Values, ...]], ...] = ()
    """By moment: the first and last that were compared, those of ``differences`` and the moment before each."""
    unchanged: int = 0
    """How often in a row, until the last, no parameter had changed from one moment to the next on any rank."""
    same_random: int = 0
    """At how many moments all ranks had the same random state."""
    unpaired: tuple[int, ...] = ()
    """Ranks of the group that wrote no moment that could be compared with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """All that was compared in a job."""

    check_every: int
    """0: the user turned it off."""
    streams: tuple[Stream, ...] = ()
    allowed: tuple[str, ...] = ()
    """Patterns of names that the user expects to differ."""
    bytes_written: int = 0
    """What one rank, the largest, has written for this."""
    unread: tuple[str, ...] = ()
    """Files of ranks that could not be read, and why: the first few."""


class Origin(str, Enum):
    """What was seen first not to be a number."""

    INPUT = "input"
    PARAMETER = "parameter"
    """A parameter was not finite before this backward."""
    LOSS = "loss"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Local gradients of one reduction that held inf or NaN before it.

    What a gradient scaler brings about now and then is not among them, unless it was used, or comes again and again.
    """

    step: int
    """The backward whose gradients were reduced, from 1."""
    model: int
    """The how-many-th DDP model of this group, from 1."""
    group: str
    tensors: tuple[str, ...]
    """The first few, in the order in which backward computes them: the last layer first."""
    count: int
    """How many parameters were concerned."""
    of: int
    origin: Origin
    is_nan: bool
    """NaN was among them; False where it was inf only."""
    scaled: bool
    """The loss was scaled by a GradScaler, which skips such steps by itself."""
    used: bool
    """An optimizer made its step with gradients that were not finite, or parameters were not finite afterwards."""
    times: int
    """For how many reductions of this rank so far, this one included."""
    in_a_row: int = 1
    """How many of these came one after another."""
    where: Frame | None = None
    """The user's line that called backward."""
    note: str = ""
    """More of what was seen, as a sentence: "argument 0 of forward holds NaN in 3 of 64 values"."""
