"""One pass over a loader: what was drawn and delivered, in numbers and digests."""

from __future__ import annotations

import time
from typing import Any, Dict, FrozenSet, List, Optional, Tuple

from . import digests
from .drawn import Drawn, numbers_of

FIRST = 8
"""So many indices stand for the first batch where they are drawn one by one."""
PRINTED_BATCHES = 4
"""So many first batches get digests. Ours: each costs 20 to 100 microseconds."""
SAMPLES = 16
"""So many samples get digests, in the first passes of a loader."""
SPLIT_SHARE = 0.6
"""A forward that takes less than this part of a batch, and none of its shapes, takes a share of it. Ours: half is what
two ranks would take; crops and shifted tokens leave more."""


class Pass:
    """What is known of one pass over a loader by now."""

    def __init__(self, number: int, epoch: Optional[int], probes: FrozenSet[int], mapped: bool) -> None:
        self.number = number
        self.epoch = epoch
        self.probes = probes
        self.mapped = mapped
        """Batches are delivered in the order in which their indices were drawn."""
        self.begun_ns = time.monotonic_ns()
        self.ended_ns: Optional[int] = None
        self.complete = False
        self.joined = False
        self.batches = self.draws = self.backwards = 0
        self.pending = 0
        """Batches delivered, with gradients on, that no backward has followed yet."""
        self.drawn = Drawn()
        self.first: Optional[int] = None
        """How many indices were drawn at first."""
        self.hits: Dict[int, List[Tuple[int, int, int]]] = {}
        """By draw: row, index and length of the batch, of samples that are to get digests."""
        self.batch_prints: List[str] = []
        self.sample_prints: List[str] = []
        self.shapes: Dict[Tuple[int, ...], None] = {}
        self.given = self.taken = 0
        """Elements of the largest leaves that were delivered, and that forwards of DDP have taken."""
        self.whole = False
        self.noted: Any = None
        """How far it had come when it was last noted."""
        self.iterator: Any = None
        """A weak reference to its iterator, once there is one."""

    def drew(self, batch: Any) -> None:
        """Take down indices as the sampler gave them: those of a batch, or one alone."""
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
        """Note where in its batch each sample is that is to get a digest."""
        if type(indices[0]) is not int:
            indices = numbers_of(list(indices))[0]
        if not self.probes.isdisjoint(indices):
            rows = [(row, index, len(indices)) for row, index in enumerate(indices) if index in self.probes]
            self.hits[self.draws] = rows

    def delivered(self, batch: Any) -> None:
        """Count a batch, and take digests of the first ones and of samples."""
        number = self.batches
        self.batches += 1
        hits = self.hits.pop(number, None) if self.hits else None
        if number >= PRINTED_BATCHES and not hits:
            return
        leaves = digests.leaves_of(batch)
        if number < PRINTED_BATCHES:
            self._digest_batch(leaves)
        if hits and self.mapped and len(self.sample_prints) < SAMPLES * digests.MAX_LEAVES:
            self._digest_samples(leaves, hits)

    def _digest_batch(self, leaves: List[digests.Leaf]) -> None:
        for number, leaf in enumerate(leaves):
            data = leaf.sample()
            if not digests.is_constant(data, leaf.item):
                self.batch_prints.append("%d:%s" % (number, digests.digest(data)))
            self.shapes[leaf.shape] = None
        self.given += max([leaf.count for leaf in leaves], default=0)

    def _digest_samples(self, leaves: List[digests.Leaf], hits: List[Tuple[int, int, int]]) -> None:
        for row, index, length in hits:
            for number, leaf in enumerate(leaves):
                if leaf.shape and leaf.shape[0] == length:
                    self.sample_prints.append("%d:%d:%s" % (index, number, digests.digest(leaf.row(row))))

    @property
    def is_watched(self) -> bool:
        """Whether forwards are still compared with what was delivered."""
        return bool(self.given) and not self.whole and self.batches <= PRINTED_BATCHES

    def forwarded(self, arguments: Any) -> None:
        """Compare what a forward takes with what was delivered, by shapes."""
        leaves = digests.shapes_of(arguments)
        self.whole = self.whole or any(shape in self.shapes for shape, _ in leaves)
        self.taken += max([count for _, count in leaves], default=0)

    def entry(self) -> Dict[str, Any]:
        """Return what is known as a note."""
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
        found.update({"bp": self.batch_prints} if self.batch_prints else {})
        found.update({"sp": self.sample_prints} if self.sample_prints else {})
        return found


def probes_of(samples: Optional[int]) -> FrozenSet[int]:
    """Return the indices that all ranks take digests of."""
    if not samples:
        return frozenset()
    return frozenset(i * samples // min(samples, SAMPLES) for i in range(min(samples, SAMPLES)))


def _several(batch: Any) -> Any:
    """Return indices that were drawn, which are no list: one alone, or a tensor, or an array."""
    if type(batch) is int:
        return (batch,)
    found = batch.tolist() if hasattr(batch, "tolist") else [batch]
    return found if type(found) is list else [found]


def _digest(order: Tuple[int, ...]) -> str:
    import hashlib

    if not order:
        return ""
    return hashlib.blake2b(",".join(map(str, order)).encode(), digest_size=6).hexdigest()
