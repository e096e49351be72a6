"""Notes how loaders divide data among ranks: which samples each pass draws, in numbers and digests, and if it trains.

A pass is one iteration over a DataLoader. It is noted at its first batch, at its end, and when the job ends. A pass
that was broken off is noted when the next one begins. Evidence of a hanging job includes the passes that still run.
"""

from __future__ import annotations

import _thread
import functools
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

from .. import hooks
from ..state import check_every, describers, guarded, here
from ..wrappers import wraps
from . import digests, passes, samplers

MAX_PASSES = 16
"""Passes of each loader that are noted at their end. The last pass is also noted when the job ends."""
EARLY_PASSES = 2
"""This many first passes are also noted at their first batch, and have digests of samples."""
MAX_BYTES = 80 * 1024
"""Room for all loaders in the journal of 512 KiB. Our choice: enough for about 100 passes."""
LAST_BYTES = 16 * 1024
"""The part of ``MAX_BYTES`` that is reserved for the last passes."""
MAX_REPORTED = 16
"""Loaders whose last pass is noted at the end and in the evidence."""


class Loader:
    """A DataLoader that was used."""

    def __init__(self, number: int, loader: Any) -> None:
        self.number = number
        self.owner = weakref.ref(loader)
        self.passes = 0
        self.trained = 0
        """Batches of earlier passes after which a backward ran."""
        self.is_noted = False
        self.samples: Optional[int] = None
        self.last: Optional[passes.LoaderPass] = None

    @property
    def was_trained(self) -> bool:
        """Whether a backward ran after any of its batches."""
        return bool(self.trained or (self.last is not None and self.last.backwards))


class Book:
    """The loaders of this process."""

    def __init__(self) -> None:
        self.loaders: Any = weakref.WeakKeyDictionary()
        """By DataLoader."""
        self.under_way: Dict[int, Tuple[Any, Loader, passes.LoaderPass]] = {}
        """By id of the iterator: a weak reference to it, the loader, and its pass. It is removed with the iterator."""
        self.opening: Dict[int, Any] = {}
        """By thread: the loader and pass whose iterator is being made and may already prefetch."""
        self.reported: List[Loader] = []
        """The few loaders that are reported: those that still exist, and the latest."""
        self.fresh: List[passes.LoaderPass] = []
        """Passes that have delivered batches, with gradients on, after which no backward has run yet."""
        self.count = 0
        self.bytes = 0


book = Book()


def patch(module: Any) -> None:
    """Patch torch.utils.data.dataloader, inside the hooks that record batches and epochs as phases."""
    if not check_every():
        return
    hooks.put(hooks.part(module, "_BaseDataLoaderIter"), "_next_index", _drawing)
    hooks.put(module.DataLoader, "__iter__", _opening)
    here.on_end.append(settle_all)
    os.register_at_fork(after_in_child=book.under_way.clear)
    describers["loaders"] = entries_now


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
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


@guarded("loaders")
def _begin(loader: Any) -> Any:
    """Begin a pass, and end the previous one. A persistent iterator prefetches before it is returned."""
    _sweep()
    known = book.loaders.get(loader)
    if known is None:
        known = _meet(loader)
    if known.last is not None:
        _end(known, known.last)
        known.trained += known.last.backwards
    known.passes += 1
    is_early = known.passes <= EARLY_PASSES
    given = digests.attributes(loader)
    mapped = is_early and bool(given.get("in_order", True))
    found = passes.LoaderPass(
        known.passes, samplers.epoch_of(loader), passes.probes_of(known.samples if mapped else None), mapped
    )
    known.last = found
    if given.get("_iterator") is not None:
        _register(given["_iterator"], (known, found))
    book.opening[_thread.get_ident()] = (known, found)
    return known, found


def _sweep() -> None:
    """End the passes that were broken off, whose iterators are gone."""
    for known in book.reported:
        one = known.last
        if one is not None and one.iterator is not None and one.iterator() is None:
            _end(known, one)


def _meet(loader: Any) -> Loader:
    book.count += 1
    known = book.loaders[loader] = Loader(book.count, loader)
    _report(known)
    entry = samplers.describe_loader(loader, known.number)
    known.samples = entry["N"]
    known.is_noted = _note(entry, MAX_BYTES - LAST_BYTES)
    return known


def _report(known: Loader) -> None:
    """Add a loader to the reported ones. If there are too many, drop one that is gone or was not used for training."""
    reported = [*book.reported, known]
    if len(reported) > MAX_REPORTED:
        reported.remove(min(reported, key=lambda one: (one.owner() is not None, one.was_trained)))
    book.reported = reported


@guarded("loaders")
def _register(iterator: Any, begun: Any) -> None:
    under_way, key = book.under_way, id(iterator)
    reference = weakref.ref(iterator, functools.partial(under_way.pop, key))  # C alone: see ``groups``
    under_way[key] = (reference, *begun)
    begun[1].iterator = reference


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
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


def delivered(iterator: Any, batch: Any) -> None:
    """Note a batch that a loader has delivered."""
    found = book.under_way.get(id(iterator))
    if found is None:
        return
    _, known, one = found
    one.delivered(batch)
    if sys.modules["torch"].is_grad_enabled():
        one.pending += 1
        if one not in book.fresh:
            book.fresh.append(one)
    if one.batches == 1 and one.number <= EARLY_PASSES:
        _note_pass(known, one, MAX_BYTES - LAST_BYTES)


@guarded("loaders")
def exhausted(iterator: Any) -> None:
    """Note that a loader has delivered all batches of a pass."""
    found = book.under_way.get(id(iterator))
    if found is None or found[-1].complete:
        return
    _, known, one = found
    one.complete = True
    if one in book.fresh and not one.backwards:  # an evaluation: the next backward does not belong to it
        book.fresh.remove(one)
    _end(known, one)


def _end(known: Loader, one: passes.LoaderPass) -> None:
    """Note once that a pass has ended, complete or broken off."""
    if one.ended_ns is not None:
        return
    one.ended_ns = time.monotonic_ns()
    if one.number <= MAX_PASSES:
        _note_pass(known, one, MAX_BYTES - LAST_BYTES)


def backward_begins() -> None:
    """Count a backward for each pass with delivered batches after which none has run yet.

    Some trainers take several batches at once. A pass that was broken off gets no backward.
    """
    waiting = []
    for one in book.fresh:
        if one.complete or one.iterator is None or one.iterator() is not None:
            one.backwards += 1
            one.pending -= 1
            if one.pending > 0:
                waiting.append(one)
    book.fresh = waiting


def forward_begins(ddp: Any, args: Any, kwargs: Any) -> None:
    """Compare the inputs of a DDP forward with the delivered batches, and note whether it is inside ``join``."""
    for one in book.fresh:
        one.joined = one.joined or bool(ddp._join_config.enable)
        if one.is_watched:
            one.forwarded((args, kwargs))


def _note_pass(known: Loader, one: passes.LoaderPass, space: int) -> None:
    if known.is_noted and one.noted != (one.batches, one.ended_ns):
        one.noted = (one.batches, one.ended_ns)
        _note(_entry(known, one), space)


def _entry(known: Loader, one: passes.LoaderPass) -> Dict[str, Any]:
    return dict(one.entry(), l=known.number, tb=known.trained + one.backwards)


def _note(entry: Dict[str, Any], space: int) -> bool:
    """Write a note if there is space for it."""
    size = len(str(entry))
    if here.ring is None or book.bytes + size > space or not here.ring.note(entry):
        return False
    book.bytes += size
    return True


@guarded("loaders")
def settle_all() -> None:
    """Note how far the last pass of each loader has got, because the job ends."""
    for known in reversed(book.reported):
        if known.last is not None:
            _note_pass(known, known.last, MAX_BYTES)


def entries_now() -> List[Dict[str, Any]]:
    """Return the last pass of each loader for the evidence. The training thread may change it meanwhile."""
    return [_entry(known, known.last) for known in list(book.reported) if known.is_noted and known.last is not None]
