"""How an epoch's samples are split over ranks: the arithmetic of DistributedSampler and DataLoader, without torch.

Source: ``distributed.py`` and ``dataloader.py`` in ``torch/utils/data`` of torch 2.13. A test compares it with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Sharing(str, Enum):
    """How the samples are split over ranks."""

    SAMPLER = "sampler"
    """By torch's DistributedSampler, or one that splits the same way."""
    SPLIT = "split"
    """By hand: ``samples[rank::world_size]``."""
    NONE = "none"
    """Not at all: every rank uses all samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """The settings that determine how the samples of one epoch are split over ranks."""

    samples: int
    world_size: int
    batch_size: int
    """Batch size of each rank's loader."""
    drop_last: bool = False
    """Whether the loader drops an incomplete last batch."""
    sampler_drop_last: bool = False
    """If the samples do not divide evenly, the sampler drops the rest (True) or repeats samples (False)."""
    sharing: Sharing = Sharing.SAMPLER
    shuffle: bool = True
    accumulation: int = 1
    """Number of batches whose gradients are accumulated for one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank gets in an epoch."""

    rank: int
    drawn: int
    """Number of indices from its sampler."""
    repeated: int
    """How many of them the sampler repeated so that all ranks draw equally many."""
    batches: int
    last_batch: int
    """Samples in the last batch, or 0 if there is no batch."""
    delivered: int
    """Samples in all its batches."""

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
    unique: int | None
    """Number of different samples that the ranks get."""

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
        return tuple(sorted({one.batches for one in self.ranks}, reverse=True))


def share_out(plan: SamplingPlan) -> Shares:
    """Return what each rank gets in an epoch."""
    ranks = tuple(_share(plan, rank) for rank in range(plan.world_size))
    delivered = sum(one.delivered for one in ranks)
    return Shares(plan=plan, ranks=ranks, delivered=delivered, unique=_unique(plan, ranks, delivered))


def count_both(plan: SamplingPlan, one: RankShare, other: RankShare) -> int:
    """Count the different samples that two ranks both get, or those of one rank.

    For ``Sharing.NONE`` with a shuffle, this holds only if ranks get all samples.
    """
    if one.rank == other.rank or plan.sharing is Sharing.NONE:
        return min(one.delivered, other.delivered, plan.samples)
    if plan.sharing is Sharing.SPLIT or plan.samples <= 0:
        return 0
    if plan.samples < plan.world_size:
        alike = one.rank % plan.samples == other.rank % plan.samples
        return int(alike and min(one.delivered, other.delivered) > 0)
    return _repeats(plan, one, other) + _repeats(plan, other, one)


def _repeats(plan: SamplingPlan, first: RankShare, again: RankShare) -> int:
    """Return 1 if the last draw of ``again`` repeats the first draw of ``first``, and both are in a batch.

    The sampler fills up with the first samples of its list, fewer than there are ranks.
    """
    repeats = again.repeated and first.rank == again.rank + (again.drawn - 1) * plan.world_size - plan.samples
    return int(bool(repeats) and first.delivered > 0 and not again.left_out)


def _share(plan: SamplingPlan, rank: int) -> RankShare:
    drawn = _drawn(plan, rank)
    batches, rest = divmod(drawn, plan.batch_size)
    short = bool(rest) and not plan.drop_last
    batches += short
    last = 0 if not batches else rest if short else plan.batch_size
    delivered = drawn if not plan.drop_last else drawn - rest
    repeated = _positions_beyond(plan, rank, drawn) if plan.sharing is Sharing.SAMPLER else 0
    return RankShare(
        rank=rank, drawn=drawn, repeated=repeated, batches=batches, last_batch=last, delivered=delivered
    )  # fmt: skip


def _drawn(plan: SamplingPlan, rank: int) -> int:
    if plan.sharing is Sharing.NONE:
        return plan.samples
    even, rest = divmod(plan.samples, plan.world_size)
    if plan.sharing is Sharing.SPLIT:
        return even + (rank < rest)
    return even if plan.sampler_drop_last else even + bool(rest)


def _positions_beyond(plan: SamplingPlan, rank: int, drawn: int) -> int:
    """Count the draws beyond the end of the samples. The sampler gives rank r the positions r, r + W, r + 2 W, ..."""
    inside = max(0, -(-(plan.samples - rank) // plan.world_size))
    return max(0, drawn - inside)


def _unique(plan: SamplingPlan, ranks: tuple[RankShare, ...], delivered: int) -> int | None:
    """Count different samples.

    After equally many draws, the ranks together have the first positions of one list. Its position p holds sample p
    modulo the number of samples, in shuffled order.
    """
    if plan.sharing is Sharing.SAMPLER:
        return min(plan.samples, delivered)
    if plan.sharing is Sharing.SPLIT:
        return delivered
    each = ranks[0].delivered
    return each if each == plan.samples or not plan.shuffle else None
