"""Draws a loader's indices for one pass without loading data, and maps them through subsets to the samples."""

from __future__ import annotations

import hashlib
import operator
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.data import EpochSeen, RankPass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DIGEST_BYTES = 12


class NoIndices(Exception):  # noqa: N818 - says what it is
    """The sampler yields something that is not a sample's index, or the dataset has no length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The dataset inside all of torch's ``Subset`` wrappers."""

    dataset: Any
    samples: int
    maps: tuple[Sequence[int], ...] = ()
    """The indices of the subsets, outermost first."""

    def trace(self, index: Any) -> int:
        """Return the sample that an index of the loader means. Raises ``NoIndices``."""
        try:
            found = operator.index(index)
            for chosen in self.maps:
                found = operator.index(chosen[found])
        except (TypeError, IndexError) as error:
            raise NoIndices(f"{type(index).__name__} is not an index") from error
        if not -self.samples <= found < self.samples:
            raise NoIndices(f"there is no sample {found}")
        return found % self.samples


def find_base(dataset: Any) -> Base:
    """Return the dataset inside all subsets, because equal indices in two subsets need not be equal samples.

    Raises ``NoIndices`` if it has no length.
    """
    from torch.utils.data import Subset

    maps = []
    while type(dataset) is Subset:
        maps.append(dataset.indices)
        dataset = dataset.dataset
    try:
        return Base(dataset=dataset, samples=len(dataset), maps=tuple(maps))
    except (TypeError, NotImplementedError) as error:
        raise NoIndices("the dataset has no length") from error


def draw_batches(loader: Any) -> Iterator[list[Any]]:
    """Yield the indices that a DataLoader would request from its workers, batch by batch."""
    if loader.batch_sampler is not None:
        yield from (list(batch) for batch in loader.batch_sampler)
    else:
        yield from ([index] for index in loader.sampler)


@dataclass(slots=True, kw_only=True)
class PassDrawn:
    """The counts of a pass while it is drawn."""

    number: int
    set_epoch: int | None
    bits: bytearray
    """Bit i % 8 of byte i // 8 is set if sample i was drawn."""
    drawn: int = 0
    batches: int = 0
    last_batch: int = 0
    total: int = 0
    xor: int = 0
    order: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
    first: str = ""

    def add(self, batch: Sequence[int]) -> None:
        """Count one batch."""
        self.order.update(struct.pack(f"<{len(batch)}q", *batch))
        if not self.batches:
            self.first = self.order.hexdigest()
        self.batches += 1
        self.last_batch = len(batch)
        self.drawn += len(batch)
        self.total += sum(batch)
        for index in batch:
            self.xor ^= index
            self.bits[index >> 3] |= 1 << (index & 7)

    @property
    def repeated(self) -> int:
        """How many draws repeated a sample."""
        return self.drawn - int.from_bytes(self.bits, "little").bit_count()

    def epoch(self, samples: tuple[str, ...]) -> EpochSeen:
        """Return the pass as the data rules need it. ``samples`` are digests of a few samples."""
        return EpochSeen(
            number=self.number,
            set_epoch=self.set_epoch,
            batches=self.batches,
            drawn=self.drawn,
            total=self.total,
            xor=self.xor,
            order=self.order.hexdigest(),
            first=self.first,
            complete=True,
            trained=True,
            sample_digests=samples,
            backwards=self.batches,
            repeats=self.repeated,
        )

    def row(self, rank: int) -> RankPass:
        """Return the pass as the report needs it."""
        return RankPass(
            rank=rank,
            drawn=self.drawn,
            repeated=self.repeated,
            batches=self.batches,
            last_batch=self.last_batch,
            complete=True,
        )


def draw_pass(loader: Any, base: Base, number: int, set_epoch: int | None) -> PassDrawn:
    """Draw one pass. Raises ``NoIndices``, and errors of the user's sampler propagate."""
    drawn = PassDrawn(number=number, set_epoch=set_epoch, bits=bytearray(-(-base.samples // 8)))
    for batch in draw_batches(loader):
        drawn.add([base.trace(index) for index in batch])
    return drawn
