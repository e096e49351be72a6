"""What ranks really drew from a dataset, counted index by index. ``sharing`` only predicts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.data import LoaderSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPass:
    """One pass of one rank over its loader."""

    rank: int
    drawn: int
    """Samples in its batches. The sampler draws the same ones, plus those of a dropped last batch."""
    repeated: int | None
    """How many of them the rank had already drawn in this pass, or None if the indices were not visible."""
    batches: int
    last_batch: int
    complete: bool
    """False if ddpdoctor ended the pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of all ranks. Counts are None if the indices were not visible or cannot be compared."""

    number: int
    ranks: tuple[RankPass, ...]
    unique: int | None = None
    """Number of different samples that some rank drew."""
    shared: int | None = None
    """Number of samples that two or more ranks drew."""
    missed: int | None = None
    """Number of samples that no rank drew."""
    alike: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that drew exactly the same set of samples."""

    @property
    def drawn(self) -> int:
        """Samples in the batches of all ranks."""
        return sum(one.drawn for one in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Everything drawn from the user's loaders."""

    world_size: int
    function: str
    """``package.module:function``."""
    samples: int | None
    """Length of the dataset below all subsets, or None if it has no length."""
    kind: str
    """Class of the object that the function returned."""
    dataset: str
    sampler: str
    """Class of the sampler; empty if there is none."""
    batch_size: int | None
    passes: tuple[Pass, ...]
    set_epoch: bool
    """The sampler's ``set_epoch`` was called before each pass."""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be inspected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDraws:
    """What one rank drew, in the form that it sends to rank 0."""

    rank: int
    host: str
    problem: str = ""
    """How the user's code failed. Nothing was drawn then."""
    help: str = ""
    loader: LoaderSeen | None = None
    kind: str = ""
    samples: int | None = None
    set_epoch: bool = False
    passes: tuple[RankPass, ...] = ()
    notes: tuple[str, ...] = ()
    compared: bool = False
    """The rank also sends the indices of each pass (``Indices``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """Which samples a rank drew in one pass."""

    bits: str
    """Bit i is set if sample i was drawn: little-endian bytes in base64."""
