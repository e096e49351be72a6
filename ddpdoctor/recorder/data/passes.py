"""One pass over a loader: what it drew and delivered, in numbers and digests."""

from __future__ import annotations

import time
from typing import Any, Dict, FrozenSet, List, Optional, Tuple

from . import digests
from .drawn import DrawnIndices, numbers_of

FIRST = 8
"""If indices are drawn one by one, this many count as the first batch."""
DIGESTED_BATCHES = 4
"""Number of first batches that get digests. Our choice: each costs 20 to 100 microseconds."""
SAMPLES = 16
"""Number of samples that get digests in the first passes of a loader."""
SPLIT_SHARE = 0.6
"""If forwards take at most this part of the delivered elements, and none of their shapes, the batch is split among
ranks. Our choice: two ranks would take half each; crops and shifted tokens leave more."""


class LoaderPass:
    """What is known so far about one pass over a loader."""

    def __init__(self, number: int, epoch: Optional[int], probes: FrozenSet[int], mapped: bool) -> None:
        self.number = number
        self.epoch = epoch
        self.probes = probes
        self.mapped = mapped
        """Whether batches are delivered in the order in which their indices were drawn."""
        self.begun_ns = time.monotonic_ns()
        self.ended_ns: Optional[int] = None
        self.complete = False
        self.joined = False
        self.batches = self.draws = self.backwards = 0
        self.pending = 0
        """Delivered batches, with gradients on, after which no backward has run yet."""
        self.drawn = DrawnIndices()
        self.first: Optional[int] = None
        """The number of indices in the first draw."""
        self.hits: Dict[int, List[Tuple[int, int, int]]] = {}
        """By draw: row, index and batch length of each sample that will get a digest."""
        self.batch_digests: List[str] = []
        self.sample_digests: List[str] = []
        self.shapes: Dict[Tuple[int, ...], None] = {}
        self.given = self.taken = 0
        """Elements of the largest delivered leaves, and of those that forwards of DDP have taken."""
        self.whole = False
        self.noted: Any = None
        """Its batches and end time when it was last noted."""
        self.iterator: Any = None
        """A weak reference to its iterator, once there is one."""

    def drew(self, batch: Any) -> None:
        """Record indices as the sampler gave them: those of a batch, or a single one."""
        indices = batch if type(batch) is list or type(batch) is tuple else _several(batch)
        if not indices:
            return
        self.drawn.add(indices)
        if self.first is None:
            self.first = len(indices)
        if self.probes:
            self._find_probes(indices)
        self.draws += 1

    def _find_probes(self, indices: Any) -> None:
        """Note the positions of the samples in a batch that will get digests."""
        if type(indices[0]) is not int:
            indices = numbers_of(list(indices))[0]
        if not self.probes.isdisjoint(indices):
            rows = [(row, index, len(indices)) for row, index in enumerate(indices) if index in self.probes]
            self.hits[self.draws] = rows

    def delivered(self, batch: Any) -> None:
        """Count a batch, and take digests of it if it is an early one, and of its chosen samples."""
        number = self.batches
        self.batches += 1
        hits = self.hits.pop(number, None) if self.hits else None
        if number >= DIGESTED_BATCHES and not hits:
            return
        leaves = digests.leaves_of(batch)
        if number < DIGESTED_BATCHES:
            self._digest_batch(leaves)
        if hits and self.mapped and len(self.sample_digests) < SAMPLES * digests.MAX_LEAVES:
            self._digest_samples(leaves, hits)

    def _digest_batch(self, leaves: List[digests.Leaf]) -> None:
        for number, leaf in enumerate(leaves):
            data = leaf.sample()
            if not digests.is_constant(data, leaf.item):
                self.batch_digests.append("%d:%s" % (number, digests.digest(data)))
            self.shapes[leaf.shape] = None
        self.given += max([leaf.count for leaf in leaves], default=0)

    def _digest_samples(self, leaves: List[digests.Leaf], hits: List[Tuple[int, int, int]]) -> None:
        for row, index, length in hits:
            for number, leaf in enumerate(leaves):
                if leaf.shape and leaf.shape[0] == length:
                    self.sample_digests.append("%d:%d:%s" % (index, number, digests.digest(leaf.row(row))))

    @property
    def is_watched(self) -> bool:
        """Whether forwards are still compared with what was delivered."""
        return bool(self.given) and not self.whole and self.batches <= DIGESTED_BATCHES

    def forwarded(self, arguments: Any) -> None:
        """Compare the inputs of a forward with the delivered batches, by shape."""
        leaves = digests.shapes_of(arguments)
        self.whole = self.whole or any(shape in self.shapes for shape, _ in leaves)
        self.taken += max([count for _, count in leaves], default=0)

    def entry(self) -> Dict[str, Any]:
        """Return what is known as an entry for the journal."""
        first = self.first if self.first is None or self.first > 1 else FIRST
        drawn = self.drawn.counted()
        order = drawn.order
        found: Dict[str, Any] = {
            "k": "pass", "p": self.number, "e": self.epoch, "b": self.batches, "d": drawn.drawn, "t": drawn.total,
            "x": drawn.xor, "h": drawn.highest, "o": _digest(order), "f": _digest(order[:first]),
            "done": int(self.complete), "bw": self.backwards, "re": len(order) - len(set(order)),
            "t0": self.begun_ns, "t1": self.ended_ns,
        }  # fmt: skip
        split = not self.whole and 0 < self.taken <= SPLIT_SHARE * self.given
        flags = {"w": drawn.worded, "split": split, "j": self.joined}
        found.update({name: 1 for name, holds in flags.items() if holds})
        found.update({"bp": self.batch_digests} if self.batch_digests else {})
        found.update({"sp": self.sample_digests} if self.sample_digests else {})
        return found


def probes_of(samples: Optional[int]) -> FrozenSet[int]:
    """Return the indices of the samples that all ranks take digests of."""
    if not samples:
        return frozenset()
    return frozenset(i * samples // min(samples, SAMPLES) for i in range(min(samples, SAMPLES)))


def _several(batch: Any) -> Any:
    """Return drawn indices that are no list or tuple (a single one, a tensor, or an array) as a list or tuple."""
    if type(batch) is int:
        return (batch,)
    found = batch.tolist() if hasattr(batch, "tolist") else [batch]
    return found if type(found) is list else [found]


def _digest(order: Tuple[int, ...]) -> str:
    import hashlib

    if not order:
        return ""
    return hashlib.blake2b(",".join(map(str, order)).encode(), digest_size=6).hexdigest()
