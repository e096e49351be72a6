"""Notes how loaders share out data: which samples each pass draws, in numbers and digests, and whether it trains.

A pass is one iteration over a DataLoader. It is noted at its first batch, at its end, when it was broken off and the
next one begins, and when the job ends; what is under way is in the evidence of a job that hangs.
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
from ..storage import ring_layout
from ..wrappers import wraps
from . import digests, loader_facts, passes, samplers

MAX_PASSES = 16
"""Passes of each loader that are noted; the last one is noted when the job ends."""
EARLY_PASSES = 2
"""The first passes are noted at their first batch as well, and have digests of samples."""
MAX_BYTES = 80 * 1024
"""Room in the journal of 512 KiB, for all loaders together. Ours: about 100 passes."""
LAST_BYTES = 16 * 1024
"""Of this, what is kept for the last passes."""
MAX_TOLD = 16
"""Loaders whose last pass is told at the end, and in the evidence."""


class Loader:
    """A DataLoader that was used."""

    def __init__(self, number: int, loader: Any) -> None:
        self.number = number
        self.owner = weakref.ref(loader)
        self.passes = 0
        self.trained = 0
        """Batches of earlier passes that a backward followed."""
        self.is_noted = False
        self.samples: Optional[int] = None
        self.last: Optional[passes.Pass] = None

    @property
    def was_trained(self) -> bool:
        """Whether a backward has followed any of its batches."""
        return bool(self.trained or (self.last is not None and self.last.backwards))


class Book:
    """The loaders of this process."""

    def __init__(self) -> None:
        self.loaders: Any = weakref.WeakKeyDictionary()
        """By DataLoader."""
        self.under_way: Dict[int, Tuple[Any, Loader, passes.Pass]] = {}
        """By id of the iterator: a weak reference to it, with which the entry goes, the loader, and its pass."""
        self.opening: Dict[int, Any] = {}
        """By thread: the pass whose iterator is being made, and draws ahead already."""
        self.told: List[Loader] = []
        """A few loaders: those that are still there, and the latest."""
        self.fresh: List[passes.Pass] = []
        """Passes that have delivered batches, with gradients on, that no backward has followed yet."""
        self.count = 0
        self.bytes = 0


book = Book()


def patch(module: Any) -> None:
    """Hooks on torch.utils.data.dataloader, inside those that record batches and epochs as phases."""
    if not check_every():
        return
    hooks.put(hooks.part(module, "_BaseDataLoaderIter"), "_next_index", _drawing)
    hooks.put(module.DataLoader, "__iter__", _opening)
    here.on_end.append(settle_all)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=book.under_way.clear)
    describers["loaders"] = entries_now


def _is_on() -> bool:
    return here.role == ring_layout.ROLE_RANK and here.ring is not None


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    def begins(self: Any) -> Any:
        if not _is_on():
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
    """Begin a pass; the one before it has ended. An iterator that is used again draws ahead before it is returned."""
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
    found = passes.Pass(
        known.passes, samplers.epoch_of(loader), passes.probes_of(known.samples if mapped else None), mapped
    )
    known.last = found
    if given.get("_iterator") is not None:
        _register(given["_iterator"], (known, found))
    book.opening[_thread.get_ident()] = (known, found)
    return known, found


def _sweep() -> None:
    """End the passes that were broken off: their iterators are gone."""
    for known in book.told:
        one = known.last
        if one is not None and one.iterator is not None and one.iterator() is None:
            _end(known, one)


def _meet(loader: Any) -> Loader:
    book.count += 1
    known = book.loaders[loader] = Loader(book.count, loader)
    _tell(known)
    entry = loader_facts.describe(loader, known.number)
    known.samples = entry["N"]
    known.is_noted = _note(entry, MAX_BYTES - LAST_BYTES)
    return known


def _tell(known: Loader) -> None:
    """Keep a loader in mind, in place of one that is gone: rather one that was not trained with."""
    told = [*book.told, known]
    if len(told) > MAX_TOLD:
        told.remove(min(told, key=lambda one: (one.owner() is not None, one.was_trained)))
    book.told = told


@guarded("loaders")
def _register(iterator: Any, begun: Any) -> None:
    reference = weakref.ref(iterator, functools.partial(_forget, book.under_way, id(iterator)))
    book.under_way[id(iterator)] = (reference, *begun)
    begun[1].iterator = reference


def _forget(under_way: Dict[int, Any], key: int, _reference: Any) -> None:
    """Forget an iterator that is gone."""
    under_way.pop(key, None)


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
    """Note a batch that a loader has handed out."""
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
    """Note that a loader has handed out all batches of a pass."""
    found = book.under_way.get(id(iterator))
    if found is None or found[-1].complete:
        return
    _, known, one = found
    one.complete = True
    if one in book.fresh and not one.backwards:  # an evaluation: the next backward is none of its own
        book.fresh.remove(one)
    _end(known, one)


def _end(known: Loader, one: passes.Pass) -> None:
    """Note the end of a pass, once: it was complete, or broken off."""
    if one.ended_ns is not None:
        return
    one.ended_ns = time.monotonic_ns()
    if one.number <= MAX_PASSES:
        _note_pass(known, one, MAX_BYTES - LAST_BYTES)


def backward_begins() -> None:
    """Count a backward for each pass that has delivered batches which none has followed yet.

    Some trainers take several batches at once. A pass that was broken off has no backward to come.
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
    """Compare what a forward of DDP takes with what was delivered, and note that it is inside ``join``."""
    for one in book.fresh:
        one.joined = one.joined or bool(ddp._join_config.enable)
        if one.is_watched:
            one.forwarded((args, kwargs))


def _note_pass(known: Loader, one: passes.Pass, room: int) -> None:
    if known.is_noted and one.noted != (one.batches, one.ended_ns):
        one.noted = (one.batches, one.ended_ns)
        _note(_entry(known, one), room)


def _entry(known: Loader, one: passes.Pass) -> Dict[str, Any]:
    return dict(one.entry(), l=known.number, tb=known.trained + one.backwards)


def _note(entry: Dict[str, Any], room: int) -> bool:
    """Write a note, where there is room for it."""
    size = len(str(entry))
    if here.ring is None or book.bytes + size > room or not here.ring.note(entry):
        return False
    book.bytes += size
    return True


@guarded("loaders")
def settle_all() -> None:
    """Note the last pass of each loader as far as it has come: the job ends."""
    for known in reversed(book.told):
        if known.last is not None:
            _note_pass(known, known.last, MAX_BYTES)


def entries_now() -> List[Dict[str, Any]]:
    """Return the last pass of each loader for the evidence. The training thread may go on meanwhile."""
    return [_entry(known, known.last) for known in list(book.told) if known.is_noted and known.last is not None]
