"""Notes how loaders divide data among ranks: which samples each pass draws, in numbers and digests, and if it trains.

Inside a loader's worker, the time to make a batch and the idle time are measured: a rank that waits for its workers
looks slow to ranks that happen to have a batch ready, although their workers may be just as slow.
"""

from __future__ import annotations

import _thread
import functools
import hashlib
import operator
import os
import sys
import time
import weakref
import zlib
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

from . import data, hooks
from .state import check_every, guarded, here, pass_on, sealed, wall
from .wrappers import hide_own_frames, wraps

MAX_PASSES = 16  # Passes of each loader that are noted at their end. The last pass is also noted when the job ends.
EARLY_PASSES = 2  # this many first passes are also noted at their first batch, and have digests of samples
MAX_BYTES = 80 * 1024  # Room for all loaders in the journal of 512 KiB. Our choice: enough for about 100 passes.
LAST_BYTES = 16 * 1024  # the part of ``MAX_BYTES`` that is reserved for the last passes
MAX_REPORTED = 16  # loaders whose last pass is noted at the end and in the evidence


class Loader:
    """A DataLoader that was used."""

    def __init__(self, number: int, loader: Any) -> None:
        self.number, self.owner, self.passes = number, weakref.ref(loader), 0
        self.trained = 0  # batches of earlier passes after which a backward ran
        self.is_noted = False
        self.samples: Optional[int] = None
        self.last: Optional[LoaderPass] = None


class Book:
    """The loaders of this process."""

    def __init__(self) -> None:
        self.loaders: Any = weakref.WeakKeyDictionary()  # by DataLoader
        # By id of the iterator: a weak reference to it, the loader, and its pass. It is removed with the iterator.
        self.under_way: Dict[int, Tuple[Any, Loader, LoaderPass]] = {}
        # By thread: the loader and pass whose iterator is being made and may already prefetch.
        self.opening: Dict[int, Any] = {}
        self.reported: List[Loader] = []  # the few loaders that are reported: those that still exist, and the latest
        # Passes that have delivered batches, with gradients on, after which no backward has run yet.
        self.fresh: List[LoaderPass] = []
        self.count = self.bytes = 0


book = Book()


def patch(module: Any) -> None:
    """Patch torch.utils.data.dataloader, inside the hooks that record batches and epochs as phases."""
    if not check_every():
        return

    def opening(original: Callable[..., Any]) -> Callable[..., Any]:
        def begins(self: Any) -> Any:
            if not here.is_rank or here.ring is None:
                return original(self)
            begun = _begin(self)
            try:
                iterator = original(self)
            finally:
                book.opening.pop(_thread.get_ident(), None)
            if begun is not None:
                _register(iterator, begun)
            return iterator

        return wraps(original)(begins)

    def drawing(original: Callable[..., Any]) -> Callable[..., Any]:
        def draws(self: Any) -> Any:
            index = original(self)
            try:
                found = book.under_way.get(id(self)) or book.opening.get(_thread.get_ident())
                if found is not None and not self._dataset_kind:  # an iterable dataset has no indices
                    found[-1].drew(index)
            except Exception as error:  # noqa: BLE001 - the recorder's wall
                here.failed("loaders", error)
            return index

        return wraps(original)(draws)

    hooks.put(hooks.part(module, "_BaseDataLoaderIter"), "_next_index", drawing)
    hooks.put(module.DataLoader, "__iter__", opening)
    here.on_end.append(settle_all)
    os.register_at_fork(after_in_child=book.under_way.clear)
    # The last pass of each loader. The training thread may change it meanwhile.
    here.describers["loaders"] = lambda: [_entry(k, k.last) for k in list(book.reported) if k.is_noted and k.last]


@guarded("loaders")
def _begin(loader: Any) -> Any:
    """Begin a pass, and end the previous one. A persistent iterator prefetches before it is returned."""
    for broken in book.reported:  # off, if its iterator is gone
        last = broken.last
        if last is not None and last.iterator is not None and last.iterator() is None:
            _end(broken, last)
    known = book.loaders.get(loader)
    if known is None:
        book.count += 1
        known = book.loaders[loader] = Loader(book.count, loader)
        reported = [*book.reported, known]
        if len(reported) > MAX_REPORTED:  # drop one that is gone or was not used for training
            trained = {old.number for old in reported if old.trained or (old.last is not None and old.last.backwards)}
            left_out = min(reported, key=lambda old: (old.owner() is not None, old.number in trained))
            reported.remove(left_out)
            if left_out.last is not None and left_out.owner() is None:  # something may still hold its iterator
                _end(left_out, left_out.last)
        book.reported = reported
        entry = data.describe_loader(loader, known.number)
        known.samples = entry["N"]
        known.is_noted = _write_entry(entry, MAX_BYTES - LAST_BYTES)
    if known.last is not None:
        _end(known, known.last)
        known.trained += known.last.backwards
    known.passes += 1
    given = data.attributes(loader)
    mapped = known.passes <= EARLY_PASSES and bool(given.get("in_order", True))
    # All ranks take digests of the same samples.
    samples = (known.samples or 0) if mapped else 0
    count = min(samples, SAMPLES)
    probes = frozenset(i * samples // count for i in range(count))
    known.last = LoaderPass(known.passes, data.epoch_of(loader), probes, mapped)
    begun = book.opening[_thread.get_ident()] = (known, known.last)
    if given.get("_iterator") is not None:
        _register(given["_iterator"], begun)
    return begun


@guarded("loaders")
def _register(iterator: Any, begun: Any) -> None:
    under_way, key = book.under_way, id(iterator)
    reference = weakref.ref(iterator, functools.partial(under_way.pop, key))  # C alone: see ``groups``
    under_way[key] = (reference, *begun)
    begun[1].iterator = reference


def delivered(iterator: Any, batch: Any) -> None:
    found = book.under_way.get(id(iterator))
    if found is None:
        return
    _, known, epoch = found
    epoch.delivered(batch)
    if sys.modules["torch"].is_grad_enabled():
        epoch.pending += 1
        if epoch not in book.fresh:
            book.fresh.append(epoch)
    if epoch.batches == 1 and epoch.number <= EARLY_PASSES:
        _note_pass(known, epoch)


@guarded("loaders")
def exhausted(iterator: Any) -> None:
    found = book.under_way.get(id(iterator))
    if found is None or found[-1].complete:
        return
    _, known, epoch = found
    epoch.complete = True
    if epoch in book.fresh and not epoch.backwards:  # an evaluation: the next backward does not belong to it
        book.fresh.remove(epoch)
    _end(known, epoch)


def _end(known: Loader, epoch: LoaderPass) -> None:
    if epoch.ended_ns is not None:
        return
    epoch.ended_ns = time.monotonic_ns()
    if epoch.number <= MAX_PASSES:
        _note_pass(known, epoch)


def backward_begins() -> None:
    """Count a backward for each pass with batches after which none has run. One that was broken off gets none."""
    waiting = []
    for loader_pass in book.fresh:
        if loader_pass.complete or loader_pass.iterator is None or loader_pass.iterator() is not None:
            loader_pass.backwards += 1
            loader_pass.pending -= 1
            if loader_pass.pending > 0:
                waiting.append(loader_pass)
    book.fresh = waiting


def forward_begins(ddp: Any, args: Any, kwargs: Any) -> None:
    for loader_pass in book.fresh:
        loader_pass.joined = loader_pass.joined or bool(ddp._join_config.enable)
        if loader_pass.given and not loader_pass.whole and loader_pass.batches <= DIGESTED_BATCHES:
            leaves = data.shapes_of((args, kwargs))
            loader_pass.whole = any(shape in loader_pass.shapes for shape, _ in leaves)
            loader_pass.taken += max([count for _, count in leaves], default=0)


def _note_pass(known: Loader, epoch: LoaderPass, space: int = MAX_BYTES - LAST_BYTES) -> None:
    if known.is_noted and epoch.noted != (epoch.batches, epoch.ended_ns):
        epoch.noted = (epoch.batches, epoch.ended_ns)
        _write_entry(_entry(known, epoch), space)


def _entry(known: Loader, epoch: LoaderPass) -> Dict[str, Any]:
    return dict(epoch.entry(), l=known.number, tb=known.trained + epoch.backwards)


def _write_entry(entry: Dict[str, Any], space: int) -> bool:
    size = len(str(entry))
    if here.ring is None or book.bytes + size > space or not here.ring.note(entry):
        return False
    book.bytes += size
    return True


@guarded("loaders")
def settle_all() -> None:
    for known in reversed(book.reported):
        if known.last is not None:
            _note_pass(known, known.last, MAX_BYTES)


FIRST = 8  # if indices are drawn one by one, this many count as the first batch
DIGESTED_BATCHES = 4  # Number of first batches that get digests. Our choice: each costs 20 to 100 microseconds.
SAMPLES = 16  # number of samples that get digests in the first passes of a loader
# If forwards take at most this part of the delivered elements, and none of their shapes, the batch is split among
# ranks. Our choice: two ranks would take half each; crops and shifted tokens leave more.
SPLIT_SHARE = 0.6


class LoaderPass:
    """What is known so far about one pass over a loader."""

    def __init__(self, number: int, epoch: Optional[int], probes: FrozenSet[int], mapped: bool) -> None:
        self.number, self.epoch, self.probes = number, epoch, probes
        self.mapped = mapped  # whether batches are delivered in the order in which their indices were drawn
        self.begun_ns = time.monotonic_ns()
        self.ended_ns: Optional[int] = None
        self.complete = self.joined = self.whole = False
        self.batches = self.draws = self.backwards = 0
        self.pending = 0  # delivered batches, with gradients on, after which no backward has run yet
        # The counted and the waiting indices. They are replaced together, so that no thread counts an index twice.
        self.drawn: Tuple[IndexCounts, List[Any]] = (IndexCounts(), [])
        self.first: Optional[int] = None  # the number of indices in the first draw
        # By draw: row, index and batch length of each sample that will get a digest.
        self.hits: Dict[int, List[Tuple[int, int, int]]] = {}
        self.batch_digests: List[str] = []
        self.sample_digests: List[str] = []
        self.shapes: Dict[Tuple[int, ...], None] = {}
        # Elements of the largest delivered leaves, and of those that forwards of DDP have taken.
        self.given = self.taken = 0
        self.noted: Any = None  # its batches and end time when it was last noted
        self.iterator: Any = None  # a weak reference to its iterator, once there is one

    def drew(self, batch: Any) -> None:
        indices = batch
        if type(batch) is not list and type(batch) is not tuple:  # a single one, a tensor, or an array
            found = batch.tolist() if hasattr(batch, "tolist") else [batch]
            indices = found if type(found) is list else [found]
        if not indices:
            return
        waiting = self.drawn[1]
        waiting.extend(indices)  # a copy, because the sampler may reuse its list
        if len(waiting) >= BULK:
            self.drawn = (counted(*self.drawn), [])
        if self.first is None:
            self.first = len(indices)
        if self.probes:
            if type(indices[0]) is not int:
                indices = numbers_of(list(indices))[0]
            if not self.probes.isdisjoint(indices):
                rows = [(row, index, len(indices)) for row, index in enumerate(indices) if index in self.probes]
                self.hits[self.draws] = rows
        self.draws += 1

    def delivered(self, batch: Any) -> None:
        number = self.batches
        self.batches += 1
        hits = self.hits.pop(number, None) if self.hits else None
        if number >= DIGESTED_BATCHES and not hits:
            return
        leaves = data.leaves_of(batch)
        if number < DIGESTED_BATCHES:
            for place, leaf in enumerate(leaves):
                read = leaf.sample()
                if not data.is_constant(read, leaf.item):
                    self.batch_digests.append("%d:%s" % (place, data.digest(read)))
                self.shapes[leaf.shape] = None
            self.given += max([leaf.size // leaf.item for leaf in leaves if leaf.item], default=0)
        if hits and self.mapped and len(self.sample_digests) < SAMPLES * data.MAX_LEAVES:
            for row, index, length in hits:
                for place, leaf in enumerate(leaves):
                    if leaf.shape and leaf.shape[0] == length:
                        self.sample_digests.append("%d:%d:%s" % (index, place, data.digest(leaf.row(row))))

    def entry(self) -> Dict[str, Any]:
        first = self.first if self.first is None or self.first > 1 else FIRST
        drawn = counted(*self.drawn)
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


def _digest(order: Tuple[int, ...]) -> str:
    return hashlib.blake2b(",".join(map(str, order)).encode(), digest_size=6).hexdigest() if order else ""


# First indices that are kept for the digest of their order. ``rules/data/shared.py`` has the same number.
MAX_ORDER = 4096
BULK = 4096  # The most indices that wait to be counted. Our choice: 32 KiB.
_WORDS = frozenset({str, bytes, int, tuple})


class IndexCounts(NamedTuple):
    """What is known about some indices."""

    drawn: int = 0
    total: int = 0
    xor: int = 0
    highest: int = -1
    worded: bool = False  # Whether some are no numbers. Their hashes are counted instead.
    order: Tuple[int, ...] = ()  # the first ``MAX_ORDER`` indices


def counted(so_far: IndexCounts, waiting: List[Any]) -> IndexCounts:
    if not waiting:
        return so_far
    numbers, total, worded = numbers_of(waiting[:])
    order = so_far.order + tuple(numbers[: MAX_ORDER - len(so_far.order)])
    highest = max(so_far.highest, max(numbers))  # noqa: PLW3301 - thousands of arguments are too many
    xor = functools.reduce(operator.xor, numbers, so_far.xor)
    worded = so_far.worded or worded
    return IndexCounts(so_far.drawn + len(numbers), so_far.total + total, xor, highest, worded, order)


def numbers_of(indices: List[Any]) -> Tuple[List[int], int, bool]:
    """Return indices as numbers, their sum, and whether some of them are not numbers."""
    try:
        total = sum(indices)
        if type(total) is int:
            return indices, total, False
    except TypeError as error:  # some are no numbers
        pass_on(error)
    numbers, worded = [], False
    for index in indices:
        try:
            numbers.append(int(operator.index(index)))
        except TypeError as error:  # a hash of it counts instead
            pass_on(error)
            numbers.append(zlib.crc32(repr(index).encode("utf-8", "replace")) if type(index) in _WORDS else 0)
            worded = True
    return numbers, sum(numbers), worded


FETCH_MODULE = "torch.utils.data._utils.fetch"
FETCHERS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")
_now_ns = time.monotonic_ns
_cpu_ns = time.thread_time_ns


class WorkerTimes:
    """What one worker has done so far."""

    def __init__(self) -> None:
        self.ring: Any = None
        self.count = self.busy_ns = self.cpu_ns = self.idle_ns = self.ended_ns = 0

    def add(self, ring: Any, began_ns: int, ended_ns: int, cpu_ns: int = 0) -> None:
        """Add a batch. A pause counts at most as long as the batch: persistent workers wait in evaluations too."""
        took = ended_ns - began_ns
        if ring is not self.ring:  # a forked child has its parent's times
            self.count = self.busy_ns = self.cpu_ns = self.idle_ns = self.ended_ns = 0
            self.ring = ring
        if self.ended_ns:
            self.idle_ns += min(began_ns - self.ended_ns, took)
        self.ended_ns = ended_ns
        self.count += 1
        self.busy_ns += took
        self.cpu_ns += cpu_ns
        ring.fetched(self.count, self.busy_ns, self.idle_ns, self.cpu_ns)


_worker_times = WorkerTimes()


def patch_fetchers(module: Any) -> None:
    for name in FETCHERS:
        fetcher = getattr(module, name, None)
        if fetcher is not None and getattr(fetcher.fetch, "__wrapped__", None) is None:
            fetcher.fetch = _timed_fetch(fetcher.fetch)


def _timed_fetch(original: Callable[..., Any]) -> Callable[..., Any]:
    @guarded("fetches")
    def made(began_ns: int, ended_ns: int, cpu_ns: int) -> None:
        if here.ring is not None:
            _worker_times.add(here.ring, began_ns, ended_ns, cpu_ns)

    def fetch(*args: Any, **kwargs: Any) -> Any:
        began, cpu = _now_ns(), _cpu_ns()
        try:
            batch = original(*args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][hide_own_frames, error]
            raise
        made(began, _now_ns(), _cpu_ns() - cpu)
        return batch

    return wraps(original)(fetch)
