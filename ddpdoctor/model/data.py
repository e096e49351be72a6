"""What was seen of how data is shared out: the samplers and loaders at work, and what each rank drew. No judgement.

Of the data itself nothing is kept: counts, sums and digests of indices, and digests of the first batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSeen:
    """The sampler of a loader. Fields are None where the sampler does not say."""

    type: str
    """Class with its module, as ``torch.utils.data.distributed.DistributedSampler``."""
    replicas: int | None = None
    rank: int | None = None
    seed: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    standard: bool = False
    """It draws as torch's DistributedSampler does: its ``__iter__`` is that one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCall:
    """The second call of ``set_epoch`` on one sampler."""

    site: Frame
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeen:
    """What a rank drew from one loader in one pass over it."""

    number: int
    """From 1: the how-many-th pass over this loader."""
    set_epoch: int | None
    """The sampler's ``epoch`` when the pass began."""
    batches: int
    """Batches that the script was given."""
    drawn: int
    """Indices drawn, which may be more than were delivered: workers fetch ahead."""
    total: int
    """Sum of the indices drawn."""
    xor: int
    """Exclusive or of them."""
    order: str
    """A digest of the indices in their order; of the first ones only, where ``first_only`` says so."""
    first: str
    """A digest of the first batch's indices, which also passes that were broken off have in common."""
    complete: bool
    """The loader came to its own end."""
    trained: bool
    """A backward ran between its batches."""
    batch_prints: tuple[str, ...] = ()
    """Digests of the first batches, in order, by leaf of the batch: "0:1a2b...", "1:77fe...". A leaf in which all
    values are the same is left out: it says nothing of which samples those were."""
    sample_prints: tuple[str, ...] = ()
    """Digests of a few samples, by index and leaf: "117:0:1a2b...". All ranks look at the same indices, so that what
    they hold can be compared although each draws in another order."""
    backwards: int = 0
    """Batches that a backward followed."""
    repeats: int = 0
    """Indices that came again among the first ones: more than a few mean sampling with replacement."""
    highest: int | None = None
    """The greatest index drawn."""
    split_after: bool = False
    """DDP's forward was given clearly less than the loader delivered: the script itself shares out each batch."""
    begun_ns: int = 0
    ended_ns: int | None = None
    """None where the pass was under way when it was last seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSeen:
    """A DataLoader, or what stands for one, as one rank used it."""

    number: int
    """From 1, in the order of first use: how loaders of different ranks are paired, with ``site``."""
    site: Frame | None
    """The user's line that loops over it."""
    dataset: str
    """Class of the dataset."""
    dataset_print: str
    """A digest of what describes the dataset: attributes that are small, and samples of those that are large; empty
    where nothing could be told. Equal for equal datasets; datasets that differ by rank mostly have different ones."""
    samples: int | None
    """Length of the dataset; None where it is iterable or has none."""
    batch_size: int | None
    drop_last: bool | None
    iterable: bool
    workers: int
    indices_seen: bool
    """The indices went through the main process, so that ``EpochSeen`` counts them."""
    sampler: SamplerSeen | None
    epochs: tuple[EpochSeen, ...]
    """The first and the last ones, in order."""
    passes: int
    """How many there were."""
    trained_batches: int = 0
    """Batches of all passes that a backward followed."""
    in_join: bool = False
    """It was used inside DDP's ``join``."""
    part_of: str = ""
    """Where the dataset is torch's ``Subset``: ``dataset_print`` of the one that it takes a part of."""
    stray_calls: tuple[EpochCall, ...] = ()
    """Calls of ``set_epoch`` on samplers of as many samples that no loader uses."""
    part: str = ""
    """A digest of which samples that ``Subset`` takes; of many, of some of them."""
