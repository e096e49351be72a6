"""What ranks drew of a dataset, index by index: exact counts, where the arithmetic of ``sharing`` can only foretell."""

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
    """Samples in its batches; where the sampler's own draws are seen, those are the same save for a last batch that is
    left out."""
    repeated: int | None
    """How many of them the rank had drawn before in this pass; None where indices were not seen."""
    batches: int
    last_batch: int
    complete: bool
    """False where the pass was ended by us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of all ranks. None is for what indices would tell, where they were not seen or cannot be compared."""

    number: int
    ranks: tuple[RankPass, ...]
    unique: int | None = None
    """Different samples that some rank drew."""
    shared: int | None = None
    """Samples that two ranks or more drew."""
    missed: int | None = None
    """Samples that no rank drew."""
    alike: tuple[tuple[int, ...], ...] = ()
    """Ranks that drew exactly the same samples as others did, by set of samples."""

    @property
    def drawn(self) -> int:
        """Samples in the batches of all ranks."""
        return sum(one.drawn for one in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """All that was drawn from the user's loaders."""

    world_size: int
    function: str
    """``package.module:function``."""
    samples: int | None
    """Length of the dataset under all subsets; None where it has none."""
    kind: str
    """Class of what the function returned."""
    dataset: str
    sampler: str
    """Class of the sampler; empty where there is none."""
    batch_size: int | None
    passes: tuple[Pass, ...]
    set_epoch: bool
    """The sampler's ``set_epoch`` was called before each pass."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, as sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDraws:
    """What one rank drew, as it sends it to rank 0."""

    rank: int
    host: str
    problem: str = ""
    """The user's code failed; nothing was drawn."""
    help: str = ""
    loader: LoaderSeen | None = None
    kind: str = ""
    samples: int | None = None
    set_epoch: bool = False
    passes: tuple[RankPass, ...] = ()
    notes: tuple[str, ...] = ()
    compared: bool = False
    """A map of the indices of each pass comes too (``Indices``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """Which samples a rank drew in one pass."""

    bits: str
    """Bit i is set where sample i was drawn: little-endian bytes, in base 64."""
