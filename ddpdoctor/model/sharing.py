"""How an epoch's samples are shared out to ranks: the arithmetic of DistributedSampler and DataLoader, without torch.

Source: ``distributed.py`` and ``dataloader.py`` of ``torch/utils/data`` in torch 2.13; a test holds it to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Sharing(str, Enum):
    """By what a rank knows which samples are its own."""

    SAMPLER = "sampler"
    """torch's DistributedSampler, or one that shares out as it does."""
    SPLIT = "split"
    """By hand: ``samples[rank::world_size]``."""
    NONE = "none"
    """Nothing: every rank goes over all samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What decides how the samples of one epoch are shared out."""

    samples: int
    world_size: int
    batch_size: int
    """Of each rank's loader."""
    drop_last: bool = False
    """Of the loader: whether a last batch that is not full is left out."""
    sampler_drop_last: bool = False
    """Of the sampler: whether what does not share out evenly is left out, and not made up for by repeated samples."""
    sharing: Sharing = Sharing.SAMPLER
    shuffle: bool = True
    accumulation: int = 1
    """Batches of which the gradients are added up for one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank gets in an epoch."""

    rank: int
    drawn: int
    """Indices that its sampler gives."""
    repeated: int
    """How many of them the sampler has repeated, so that all ranks draw equally many."""
    batches: int
    last_batch: int
    """Samples in the last batch; 0 where there is none."""
    delivered: int
    """Samples in all its batches."""

    @property
    def left_out(self) -> int:
        """Samples that were drawn and are in no batch, because the last one was not full."""
        return self.drawn - self.delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What all ranks get in an epoch. None is for what the order of a shuffle decides."""

    plan: Plan
    ranks: tuple[RankShare, ...]
    delivered: int
    unique: int | None
    """Different samples that some rank is given."""

    @property
    def duplicates(self) -> int | None:
        """Samples that are given once more than needed, on the same rank or on another."""
        return None if self.unique is None else self.delivered - self.unique

    @property
    def missed(self) -> int | None:
        """Samples that no rank is given."""
        return None if self.unique is None else self.plan.samples - self.unique

    @property
    def batches(self) -> tuple[int, ...]:
        """The different numbers of batches that ranks have, the largest first."""
        return tuple(sorted({one.batches for one in self.ranks}, reverse=True))


def share_out(plan: Plan) -> Shares:
    """Return what each rank gets in an epoch."""
    ranks = tuple(_share(plan, rank) for rank in range(plan.world_size))
    delivered = sum(one.delivered for one in ranks)
    return Shares(plan=plan, ranks=ranks, delivered=delivered, unique=_unique(plan, ranks, delivered))


def _share(plan: Plan, rank: int) -> RankShare:
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


def _drawn(plan: Plan, rank: int) -> int:
    if plan.sharing is Sharing.NONE:
        return plan.samples
    even, rest = divmod(plan.samples, plan.world_size)
    if plan.sharing is Sharing.SPLIT:
        return even + (rank < rest)
    return even if plan.sampler_drop_last else even + bool(rest)


def _positions_beyond(plan: Plan, rank: int, drawn: int) -> int:
    """Count the draws that begin the samples anew: the sampler gives rank r the positions r, r + W, r + 2 W, ..."""
    inside = max(0, -(-(plan.samples - rank) // plan.world_size))
    return max(0, drawn - inside)


def _unique(plan: Plan, ranks: tuple[RankShare, ...], delivered: int) -> int | None:
    """Count different samples.

    What the sampler's ranks have been given after equally many draws are the first positions of one list, in which
    position p holds sample p modulo their number (in the order of the shuffle).
    """
    if plan.sharing is Sharing.SAMPLER:
        return min(plan.samples, delivered)
    if plan.sharing is Sharing.SPLIT:
        return delivered
    each = ranks[0].delivered
    return each if each == plan.samples or not plan.shuffle else None
