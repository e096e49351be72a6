"""Facts about how data is split over ranks: what ``sharing`` predicts, and what each rank drew, index by index."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSeen:
    """The sampler of a loader. A field is None if the sampler does not have it."""

    type: str  # class with its module, such as ``torch.utils.data.distributed.DistributedSampler``
    replicas: int | None = None
    rank: int | None = None
    seed: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    planned: int | None = None  # how many indices it gives this rank in a pass
    standard: bool = False  # its ``__iter__`` is that of torch's DistributedSampler, so it draws the same way


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What divides samples among ranks on their way to a loader: a loader, a sampler, or the dataset itself."""

    what: str  # ``loader``, ``sampler`` or ``dataset``
    type: str
    replicas: int | None  # None: its code asks for the number of ranks, and no attribute has it
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which indices a ``Subset`` has. A field is None if there were too many, or if they are not a range."""

    of: int  # length of the dataset below it
    count: int
    total: int | None
    xor: int | None
    start: int | None
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCall:
    """The second call of ``set_epoch`` on one sampler."""

    site: Frame
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeen:
    """What a rank drew from one loader in one pass over it."""

    number: int  # number of the pass over this loader, from 1
    set_epoch: int | None  # the sampler's ``epoch`` when the pass began
    batches: int  # batches that the script received
    drawn: int  # Indices drawn. This may be more than were delivered, because workers fetch ahead.
    total: int  # sum of the drawn indices
    xor: int  # exclusive or of the drawn indices
    order: str  # a digest of the indices in their order: of the first 4096 from the recorder, of all from `check-data`
    first: str  # A digest of the first batch's indices. Passes that broke off can be compared by it too.
    complete: bool  # the loader was exhausted
    trained: bool  # a backward ran between its batches
    # Digests of the first batches, in order, by leaf of the batch: "0:1a2b...", "1:77fe...". A leaf whose values are
    # all equal is left out, because it does not identify samples.
    batch_digests: tuple[str, ...] = field(default=(), metadata={"json": "batch_prints"})
    # Digests of a few samples, by index and leaf: "117:0:1a2b...". All ranks use the same indices, so that their
    # samples can be compared although each rank draws in a different order.
    sample_digests: tuple[str, ...] = field(default=(), metadata={"json": "sample_prints"})
    backwards: int = 0  # batches that a backward followed
    repeats: int = 0  # Repeated indices among the first ones. More than a few mean sampling with replacement.
    highest: int | None = None  # the highest index drawn
    split_after: bool = False  # DDP's forward got clearly less than the loader delivered: the script splits each batch
    begun_ns: int = 0
    ended_ns: int | None = None  # None if the pass was still running when it was last recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSeen:
    """A DataLoader, or an object used like one, on one rank."""

    number: int  # From 1, in the order of first use. With ``site``, it pairs the loaders of different ranks.
    site: Frame | None  # the user's line that loops over it
    dataset: str  # class of the dataset
    # A digest of the dataset's small attributes and of samples of its large ones; empty if nothing could be read. Equal
    # datasets have equal digests. Datasets that differ by rank mostly have different ones.
    dataset_digest: str = field(metadata={"json": "dataset_print"})
    samples: int | None  # length of the dataset, or None if it is iterable or has no length
    batch_size: int | None
    drop_last: bool | None
    iterable: bool
    workers: int
    indices_seen: bool  # the indices passed through the main process, so ``EpochSeen`` counts them
    sampler: SamplerSeen | None
    epochs: tuple[EpochSeen, ...]  # the first and the last passes, in order
    passes: int  # number of all passes
    trained_batches: int = 0  # batches of all passes that a backward followed
    in_join: bool = False  # it was used inside DDP's ``join``
    part_of: str = ""  # if the dataset is torch's ``Subset``: ``dataset_digest`` of the dataset below it
    stray_calls: tuple[EpochCall, ...] = ()  # calls of ``set_epoch`` on unused samplers of equally many samples
    part: str = ""  # a digest of the indices of that ``Subset``, or of some of them if there are many
    chosen: Chosen | None = None  # these indices, added up
    held: str = ""  # if the dataset divides itself: a digest of its containers without its rank
    cuts: tuple[Cut, ...] = ()  # everything that divides its samples among ranks, the outermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTaken:
    """What one rank of a job took from a loader in one pass."""

    rank: int
    batches: int
    drawn: int | None  # indices drawn, or None if they were not visible
    order: str  # a digest of these indices in their order; empty if they were not visible
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTaken:
    """One pass of several ranks over a loader."""

    number: int
    ranks: tuple[RankTaken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTaken:
    """What the ranks of a job took from a loader that they trained with, for the report."""

    file: str  # the user's line that loops over it on the lowest rank; empty if it is unknown
    line: int
    passes: tuple[PassTaken, ...]  # the first and the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPass:
    """One pass of one rank over its loader."""

    rank: int
    drawn: int  # Samples in its batches. The sampler draws the same ones, plus those of a dropped last batch.
    repeated: int | None  # how many of them the rank had already drawn in this pass; None: not visible
    batches: int
    last_batch: int
    complete: bool  # False if ddpdoctor ended the pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of all ranks. Counts are None if the indices were not visible or cannot be compared."""

    number: int
    ranks: tuple[RankPass, ...]
    unique: int | None = None  # number of different samples that some rank drew
    shared: int | None = None  # number of samples that two or more ranks drew
    missed: int | None = None  # number of samples that no rank drew
    alike: tuple[tuple[int, ...], ...] = ()  # groups of ranks that drew exactly the same set of samples
    # How many different samples two ranks both drew: one row per rank, in the order of ``ranks``. On the diagonal are
    # those of one rank. Only for the first ranks, at most 64.
    overlaps: tuple[tuple[int, ...], ...] = ()

    @property
    def drawn(self) -> int:
        return sum(rank.drawn for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Everything drawn from the user's loaders."""

    world_size: int
    function: str  # ``package.module:function``
    samples: int | None  # length of the dataset below all subsets, or None if it has no length
    kind: str  # class of the object that the function returned
    dataset: str
    sampler: str  # class of the sampler; empty if there is none
    batch_size: int | None
    passes: tuple[Pass, ...]
    set_epoch: bool  # the sampler's ``set_epoch`` was called before each pass
    notes: tuple[str, ...] = ()  # sentences about what could not be inspected


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDraws:
    """What one rank drew, in the form that it sends to rank 0."""

    rank: int
    host: str
    problem: str = ""  # How the user's code failed. Nothing was drawn then.
    help: str = ""
    loader: LoaderSeen | None = None
    kind: str = ""
    samples: int | None = None
    set_epoch: bool = False
    passes: tuple[RankPass, ...] = ()
    notes: tuple[str, ...] = ()
    compared: bool = False  # the rank also sends the indices of each pass (``Indices``)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """Which samples a rank drew in one pass."""

    bits: str  # bit i is set if sample i was drawn: little-endian bytes in base64


class Sharing(str, Enum):
    """How the samples are split over ranks."""

    SAMPLER = "sampler"  # by torch's DistributedSampler, or one that splits the same way
    SPLIT = "split"  # by hand: ``samples[rank::world_size]``
    NONE = "none"  # not at all: every rank uses all samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """The settings that determine how the samples of one epoch are split over ranks."""

    samples: int
    world_size: int
    batch_size: int  # batch size of each rank's loader
    drop_last: bool = False  # whether the loader drops an incomplete last batch
    sampler_drop_last: bool = False  # else it repeats samples if they do not divide evenly
    sharing: Sharing = Sharing.SAMPLER
    shuffle: bool = True
    accumulation: int = 1  # number of batches whose gradients are accumulated for one step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank gets in an epoch."""

    rank: int
    drawn: int  # number of indices from its sampler
    repeated: int  # how many of them the sampler repeated so that all ranks draw equally many
    batches: int
    last_batch: int  # samples in the last batch, or 0 if there is no batch
    delivered: int  # samples in all its batches

    @property
    def left_out(self) -> int:
        """Drawn samples that are in no batch, because the last batch was incomplete."""
        return self.drawn - self.delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What all ranks get in an epoch. A count is None if it depends on the shuffle."""

    plan: SamplingPlan
    ranks: tuple[RankShare, ...]
    delivered: int
    unique: int | None  # number of different samples that the ranks get

    @property
    def duplicates(self) -> int | None:
        """Number of repeated deliveries of a sample, on the same rank or on another."""
        return None if self.unique is None else self.delivered - self.unique

    @property
    def missed(self) -> int | None:
        """Number of samples that no rank gets."""
        return None if self.unique is None else self.plan.samples - self.unique

    @property
    def batches(self) -> tuple[int, ...]:
        """The different numbers of batches per rank, the largest first."""
        return tuple(sorted({rank.batches for rank in self.ranks}, reverse=True))


def share_out(plan: SamplingPlan) -> Shares:
    """Return what each rank gets in an epoch."""
    ranks = tuple(_share(plan, rank) for rank in range(plan.world_size))
    delivered = sum(rank.delivered for rank in ranks)
    # Count different samples. After equally many draws, the ranks together have the first positions of one list. Its
    # position p holds sample p modulo the number of samples, in shuffled order.
    unique: int | None
    if plan.sharing is Sharing.SAMPLER:
        unique = min(plan.samples, delivered)
    elif plan.sharing is Sharing.SPLIT:
        unique = delivered
    else:
        each = ranks[0].delivered
        unique = each if each == plan.samples or not plan.shuffle else None
    return Shares(plan=plan, ranks=ranks, delivered=delivered, unique=unique)


def count_both(plan: SamplingPlan, share: RankShare, other: RankShare) -> int:
    """Count the different samples that two ranks both get; without sharing only if ranks get all samples."""
    if share.rank == other.rank or plan.sharing is Sharing.NONE:
        return min(share.delivered, other.delivered, plan.samples)
    if plan.sharing is Sharing.SPLIT or plan.samples <= 0:
        return 0
    if plan.samples < plan.world_size:
        alike = share.rank % plan.samples == other.rank % plan.samples
        return int(alike and min(share.delivered, other.delivered) > 0)
    return _repeats(plan, share, other) + _repeats(plan, other, share)


def _repeats(plan: SamplingPlan, first: RankShare, again: RankShare) -> int:
    """Return 1 if the last draw of ``again`` repeats the first draw of ``first``, and both are in a batch.

    The sampler fills up with the first samples of its list, fewer than there are ranks.
    """
    repeats = again.repeated and first.rank == again.rank + (again.drawn - 1) * plan.world_size - plan.samples
    return int(bool(repeats) and first.delivered > 0 and not again.left_out)


def _share(plan: SamplingPlan, rank: int) -> RankShare:
    even, more = divmod(plan.samples, plan.world_size)
    if plan.sharing is Sharing.NONE:
        drawn = plan.samples
    elif plan.sharing is Sharing.SPLIT:
        drawn = even + (rank < more)
    else:
        drawn = even if plan.sampler_drop_last else even + bool(more)
    batches, rest = divmod(drawn, plan.batch_size)
    short = bool(rest) and not plan.drop_last
    batches += short
    last = 0 if not batches else rest if short else plan.batch_size
    delivered = drawn if not plan.drop_last else drawn - rest
    # The sampler gives rank r the positions r, r + W, r + 2 W, ..., also beyond the end of the samples.
    inside = max(0, -(-(plan.samples - rank) // plan.world_size))
    repeated = max(0, drawn - inside) if plan.sharing is Sharing.SAMPLER else 0
    return RankShare(rank=rank, drawn=drawn, repeated=repeated, batches=batches, last_batch=last, delivered=delivered)
