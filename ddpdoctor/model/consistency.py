"""Facts about the states of replicas: where ranks differ, and which gradients are not finite.

Ranks record 16 bytes per tensor at the same points of training. Tensor names are those of the wrapped module, without
``module.``. Steps are counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.words import outvoted, rank_list

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame

MESH = "mesh "  # prefix of a stream's group if it is a set of device mesh dimensions instead of a process group
MAX_NAMED = 5  # How many differences a message names (our choice). The result holds all of them.


class What(str, Enum):
    """What a tensor is."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"  # what the optimizer gets: after the reduction and any changes by the script
    BUFFER = "buffer"
    STATE = "optimizer state"


class StreamClock(str, Enum):
    """The event at which ranks record their state, and that numbers these points in time."""

    STEP = "optimizer step"  # right before (gradients) and after (all else) step N of an optimizer of the model
    FORWARD = "forward"  # At the forward after N reduced backwards. Used if no torch optimizer holds the parameters.
    SYNC = "sync of buffers"  # right after DDP broadcasts rank 0's buffers, in the forward after N reduced backwards
    END = "end"  # at the end of training, after N reduced backwards


# The best clock first. The others check the same tensors.
BEST_CLOCKS = (StreamClock.STEP, StreamClock.FORWARD, StreamClock.END, StreamClock.SYNC)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """A tensor of which ranks record 16 bytes each time."""

    what: What
    name: str
    # For optimizer state, which part of it, such as ``exp_avg``. For a constant of a device mesh, which is a buffer or
    # a frozen parameter: dtype and shape, such as ``float32[16]``.
    part: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What a rank recorded beside its tensors at one point in time."""

    rank: int
    steps: int  # steps of this optimizer so far, or 0 if there is no optimizer
    reductions: int  # backwards of this model so far whose gradients DDP has reduced
    forwards: int  # forwards of DDP with gradients since the previous step, with or without a reduction
    unreduced_forwards: int  # how many of those were under ``no_sync``
    settings: tuple[tuple[str, str], ...] = ()  # of the optimizer: ("lr", "0.1"), ("1.weight_decay", "0.01")
    optimizer: str = ""  # class of the optimizer
    scale: float | None = None  # scale of the gradient scaler, if there is one
    random: str = ""  # a digest of torch's random state on this rank
    dropout: bool = False  # the model trains with dropout
    unreduced: tuple[str, ...] = ()  # the first that DDP does not reduce: added, replaced or unfrozen after wrapping
    unfinished: tuple[str, ...] = ()  # the first whose gradients DDP still waited for at this step
    stray: int = 0  # tensors in the optimizers of this process that are not parameters of any DDP model
    unheld: int = 0  # trainable parameters of the model that are in no optimizer of this process
    # The first of the ``unheld`` parameters for which an optimizer holds a stray tensor of equal shape that never had a
    # gradient.
    replaced: tuple[str, ...] = ()
    # The first parameters that get gradients, are in no optimizer of this process, and did not change recently. Those
    # that ``late`` counts come first.
    untrained: tuple[str, ...] = ()
    untrained_count: int = 0
    # The first constants of a device mesh that ``to_empty`` made and nothing wrote to in place since. ``*`` stands for
    # numbers in their names.
    unwritten: tuple[str, ...] = ()
    late: int = 0  # how many of these were added to a module after the optimizer was built
    own_steps: int = 0  # for a model outside DDP: steps right after a backward that reached no DDP model
    through: int = 0  # for a model outside DDP: backwards that reached a DDP model through it
    join: bool = False  # inside DDP's ``join``: ranks may take different numbers of steps
    hook: str = ""  # the communication hook that the script registered
    site: Frame | None = None  # the user's line that made the step


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """One tensor whose contents differ between ranks."""

    row: TensorRow
    # Sets of ranks with equal contents, the largest set first. Sets of equal size are sorted by lowest rank.
    sides: tuple[tuple[int, ...], ...]
    absent_on: tuple[int, ...] = ()  # ranks without it, for example because the gradient is None; they form a side too


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first point in time at which tensors of one kind differed."""

    what: What
    number: int  # number of this point by the clock of its stream
    last_equal: int | None  # the last earlier point at which all of this kind were equal
    splits: tuple[TensorSplit, ...]  # the first tensors that differ, in the order of the model
    differing: int  # how many tensors differ in all
    of: int  # how many tensors of this kind were compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The states of one model, recorded repeatedly by one clock."""

    clock: StreamClock
    group: str  # Name of the process group whose replicas stay equal. For a device mesh: ``MESH`` and its dimensions.
    model: int  # of the DDP model within this group, from 1; below 0: trained outside DDP
    optimizer: int  # number of the optimizer that steps with its parameters, from 1, or 0 if there is none
    ranks: tuple[int, ...]  # ranks whose records were compared
    compared: int  # number of points in time that were compared
    last_number: int | None  # number of the last of these points
    tensors: int = 0  # number of tensors at the last point, on the lowest of its ranks
    kinds: tuple[What, ...] = ()  # kinds of the tensors that could be compared
    differences: tuple[Difference, ...] = ()  # at most one of each kind
    # By number: the first and last point compared, the points of ``differences``, and the point before each.
    values: tuple[tuple[int, tuple[Values, ...]], ...] = ()
    unchanged: int = 0  # how many of the last points in a row showed no change of any parameter on any rank
    same_random: int = 0  # at how many points all ranks had the same random state
    every: int = 0  # the distance of the last points if the recorder chose it, 0 if it was given
    unpaired: tuple[int, ...] = ()  # ranks of the group without a record that could be compared with others


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """All comparisons of a job."""

    check_every: int  # Steps between comparisons. 0: the user turned them off.
    streams: tuple[Stream, ...] = ()
    allowed: tuple[str, ...] = ()  # patterns of names that the user expects to differ
    bytes_written: int = 0  # the most bytes that any one rank has written for this
    unread: tuple[str, ...] = ()  # the first few files of ranks that could not be read, with reasons


class Origin(str, Enum):
    """The first value that was not finite."""

    INPUT = "input"
    PARAMETER = "parameter"  # a parameter was not finite before this backward
    LOSS = "loss"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Local gradients with inf or NaN before a reduction, without what a gradient scaler causes now and then."""

    step: int  # the backward whose gradients were reduced, from 1
    model: int  # number of the DDP model within this group, from 1
    group: str
    tensors: tuple[str, ...]  # the first few, in the order in which backward computes them: the last layer first
    count: int  # how many parameters were affected
    of: int
    origin: Origin
    is_nan: bool  # NaN was among them. False if there was only inf.
    scaled: bool  # the loss was scaled by a GradScaler, which skips such steps by itself
    used: bool  # an optimizer stepped with non-finite gradients, or parameters were not finite afterwards
    times: int  # number of such reductions on this rank so far, including this one
    in_a_row: int = 1  # how many of these were consecutive
    where: Frame | None = None  # the user's line that called backward
    note: str = ""  # a sentence with more evidence: "argument 0 of forward holds NaN in 3 of 64 values"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRoot:
    """A digest of one stream on a node's ranks, over a range of points in time."""

    stream: str  # name of the stream, equal on all nodes
    ranks: tuple[int, ...]  # the ranks of the node that recorded it
    since: int  # the range starts after this point
    upto: int  # the last point of the range
    root: str  # equal if the numbers and contents are equal
    random: str = ""  # equal if random states are equal; empty if the node's own ranks differ


@dataclass(frozen=True, slots=True, kw_only=True)
class SideKept:
    """Ranks of a node that had the same contents at one point in time."""

    ranks: tuple[int, ...]
    table: int  # index into the tables of ``StreamKept``, which list the tensors
    fingerprints: str = field(metadata={"json": "prints"})
    texts: tuple[str, ...]  # one per rank: the ``Values`` that it recorded, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKept:
    """The contents on a node's ranks at one point in time."""

    number: int
    sides: tuple[SideKept, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKey:
    """What records of several ranks must share to be compared."""

    clock: StreamClock
    group: str
    members: tuple[int, ...]  # ranks of the group, because groups of different ranks may share a name
    model: int
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKept(StreamKey):
    """The last points of one stream, not yet compared with those of other nodes."""

    name: str  # the same as ``StreamRoot.stream``
    tables: tuple[tuple[TensorRow, ...], ...]
    points: tuple[StepKept, ...] = field(metadata={"json": "moments"})
    found: Stream  # the result of the comparison so far, within one node or over all nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStreams:
    """All that a node keeps for comparison in one attempt."""

    streams: tuple[StreamKept, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RootsReport:
    """Each node sends this to the first node every few seconds."""

    roots: tuple[StreamRoot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootsRequest:
    """The first node sends this to all others every few seconds."""

    turn: int = 0  # how often contents were requested
    wanted: tuple[str, ...] = ()  # the streams whose contents are requested
    settled: dict[str, int] = field(default_factory=dict)  # by stream: the last point no longer needed


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor or setting whose values differ between ranks."""

    what: str  # "parameter", "gradient", "buffer", "optimizer state" or "optimizer setting"
    name: str  # The name in the module, without ``module.``. A setting has its own name: "lr" or "group 1: lr".
    part: str  # for optimizer state, which part: "exp_avg"; else empty
    sides: tuple[tuple[int, ...], ...]  # sets of global ranks with equal values, the largest set first
    values: tuple[str, ...]  # one per side: a setting, "float32[8, 16]" for a tensor, "none" if it is missing

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the minority, or all ranks if no majority agrees."""
        return outvoted(self.sides)

    def __str__(self) -> str:
        part = f" ({self.part})" if self.part else ""
        shown = len(set(self.values)) > 1
        both = zip(self.sides, self.values, strict=True)
        sides = [rank_list(side) + (f": {value}" if shown else "") for side, value in both]
        return f"{self.what} {self.name}{part}: " + (", " if shown else " against ").join(sides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencyResult:
    """Whether the replicas of a group are equal. All its ranks get the same result."""

    equal: bool
    # Optimizer settings first, because they explain the rest. Then parameters, buffers, gradients, optimizer state.
    differences: tuple[TensorDifference, ...]
    ranks: tuple[int, ...]  # the global ranks that were compared
    compared: int  # number of tensors and settings that this rank contributed
    left_out: tuple[str, ...]  # phrases that say what was not compared on this rank, and why

    @property
    def text(self) -> str:
        who = rank_list(self.ranks)
        if self.equal:
            return f"replicas are equal on {who}: {self.compared} tensors and settings compared"
        named = "; ".join(map(str, self.differences[:MAX_NAMED]))
        more = len(self.differences) - MAX_NAMED
        return f"replicas differ on {who}: {named}" + (f"; and {more} more" if more > 0 else "")

    def __bool__(self) -> bool:
        return self.equal


class ConsistencyError(RuntimeError):
    """Replicas that should be equal are not. The message names the first differences; ``result`` has all."""

    def __init__(self, result: ConsistencyResult) -> None:
        super().__init__(result.text)
        self.result = result
