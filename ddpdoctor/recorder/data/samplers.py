"""Reads from the attributes of a loader and its sampler, whatever library it is from, how it divides the samples.

Also notes a sampler whose ``set_epoch`` is called every epoch but that no loader uses.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any, Dict, Iterator, Optional

from .. import frames, hooks
from ..state import check_every, guarded, here
from ..wrappers import around
from .dataset_digest import digest_of
from .digests import attributes

MAX_NESTED = 6
"""Nested samplers that are examined."""

CALLS = 2
"""Calls after which a sampler without a loader is noted. By the second call the first epoch's loop is over."""
MAX_NOTED = 8

_counts: Any = weakref.WeakKeyDictionary()
"""By sampler: how often its epoch was set."""
_noted: Dict[int, Any] = {}
"""By the number of the note: a weak reference to the sampler."""
used: Any = weakref.WeakSet()
"""Samplers that divide samples among ranks and with which a loader has begun a pass."""
_SHUFFLES = {"RandomSampler": True, "SequentialSampler": False}
_INNER = ("batch_sampler", "sampler", "base_sampler")
_REPLICAS = ("num_replicas", "num_processes", "world_size")
_RANK = ("rank", "process_index")
_SEED = ("seed", "initial_seed")


def describe_loader(loader: Any, number: int) -> Dict[str, Any]:
    """Return the journal entry of loader ``number`` of this process."""
    given = attributes(loader)
    iterable = bool(given.get("_dataset_kind"))  # _DatasetKind.Iterable is 1, Map is 0
    return {
        "k": "loader",
        "n": number,
        "site": frames.describe_user(sys._getframe()),
        "ds": class_name(given.get("dataset")),
        "dp": digest_of(given.get("dataset")),
        "N": None if iterable else length_of(given.get("dataset")),
        "bs": _batch_size(given),
        "dl": given.get("drop_last") if isinstance(given.get("drop_last"), bool) else None,
        "it": int(iterable),
        "w": given.get("num_workers") if isinstance(given.get("num_workers"), int) else 0,
        "sampler": None if iterable else _describe_sampler(loader),
        **_part(given.get("dataset")),
    }


def _part(dataset: Any) -> Dict[str, Any]:
    """Return, for a torch Subset, the digests of the whole dataset and of the chosen indices."""
    if type(dataset) is not getattr(sys.modules.get("torch.utils.data.dataset"), "Subset", None):
        return {}
    given = attributes(dataset)
    return {
        "of": digest_of(given.get("dataset")),
        "part": digest_of(given.get("indices")),
    }


def _batch_size(given: Dict[str, Any]) -> Optional[int]:
    """Return the batch size of the loader, or of its batch sampler if it was given one."""
    for found in (given.get("batch_size"), attributes(given.get("batch_sampler")).get("batch_size")):
        if type(found) is int:
            return found
    return None


def _describe_sampler(loader: Any) -> Optional[Dict[str, Any]]:
    """Describe the sampler that divides samples among ranks, else the loader's own one; None if there is no sampler."""
    chain = list(_chain(loader))
    if not chain:
        return None
    sharing = _sharing(chain)
    if sharing is None:
        plain = _plain(chain)
        return {"type": class_name(plain), "shuffle": _SHUFFLES.get(type(plain).__name__)}
    given = attributes(sharing)
    return {
        "type": class_name(sharing),
        "replicas": _number(given, _REPLICAS),
        "rank": _number(given, _RANK),
        "seed": _number(given, _SEED),
        "shuffle": _boolean(given, "shuffle"),
        "drop_last": _boolean(given, "drop_last"),
        "standard": int(_is_standard(loader, sharing)),
    }


def epoch_of(loader: Any) -> Optional[int]:
    """Return the epoch that the sampler of a pass has been set to, or None if it has no epoch."""
    chain = list(_chain(loader))
    sharing = _sharing(chain)
    if sharing is not None:
        _use(sharing)
    for sampler in [sharing] if sharing is not None else chain:
        epoch = _number(attributes(sampler), ("epoch",))
        if epoch is not None:
            return epoch
    return None


def _use(sampler: Any) -> None:
    try:
        if sampler in used:
            return
        used.add(sampler)
    except TypeError:  # the class supports no hashes or no weak references
        return
    _withdraw(sampler)


def length_of(dataset: Any) -> Optional[int]:
    """Return the length of a dataset, or None if it has none."""
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001 - some have no length, even if they have the method
        return None


def class_name(value: Any) -> str:
    """Return the class of an object, with its module."""
    kind = type(value)
    return ("%s.%s" % (kind.__module__, kind.__qualname__))[:200]


def _chain(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader, the outer ones first."""
    seen = [attributes(loader).get("batch_sampler"), attributes(loader).get("sampler")]
    found = 0
    known = set()
    while seen and found < MAX_NESTED:
        sampler = seen.pop(0)
        if sampler is None or id(sampler) in known or type(sampler).__name__ == "_InfiniteConstantSampler":
            continue
        known.add(id(sampler))
        found += 1
        yield sampler
        seen[:0] = [attributes(sampler).get(name) for name in _INNER]


def _sharing(chain: Any) -> Any:
    """Return the first sampler that knows the number of ranks and its own rank."""
    for sampler in chain:
        given = attributes(sampler)
        if _number(given, _REPLICAS) is not None and _number(given, _RANK) is not None:
            return sampler
    return None


def _plain(chain: Any) -> Any:
    """Return the sampler that decides the order: the first one that is not torch's BatchSampler."""
    own = getattr(sys.modules.get("torch.utils.data.sampler"), "BatchSampler", None)
    return next((sampler for sampler in chain if type(sampler) is not own), chain[0])


def _is_standard(loader: Any, sampler: Any) -> bool:
    """Return whether the loader draws exactly what torch's DistributedSampler gives, batch by batch."""
    own: Any = getattr(sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", None)
    batches = getattr(sys.modules.get("torch.utils.data.sampler"), "BatchSampler", None)
    given = attributes(loader)
    if (
        own is None
        or given.get("sampler") is not sampler
        or getattr(type(sampler), "__iter__", None) is not own.__iter__
    ):
        return False
    return given.get("batch_sampler") is None or type(given["batch_sampler"]) is batches


def _number(given: Dict[str, Any], names: Any) -> Optional[int]:
    for name in names:
        if type(given.get(name)) is int:
            return int(given[name])
    return None


def _boolean(given: Dict[str, Any], name: str) -> Optional[bool]:
    return given[name] if type(given.get(name)) is bool else None


def patch(module: Any) -> None:
    """Watch ``set_epoch`` of torch's DistributedSampler and its subclasses."""
    if check_every():
        hooks.put(module.DistributedSampler, "set_epoch", lambda original: around(original, after=_called))


@guarded("epoch calls")
def _called(sampler: Any) -> None:
    hashable = getattr(type(sampler), "__hash__", None) is not None
    if not here.is_rank or here.ring is None or not hashable or sampler in used:
        return
    count = _counts[sampler] = _counts.get(sampler, 0) + 1
    if count == CALLS and len(_noted) < MAX_NOTED:
        number = len(_noted) + 1
        _noted[number] = weakref.ref(sampler)
        samples = length_of(attributes(sampler).get("dataset"))
        entry = {"k": "epoch_call", "n": number, "N": samples, "at": time.monotonic_ns()}
        here.ring.note(dict(entry, site=frames.describe_user(sys._getframe())))


def _withdraw(sampler: Any) -> None:
    """Withdraw a note, because a loader uses the sampler after all."""
    for number, known in _noted.items():
        if known() is sampler and here.ring is not None:
            here.ring.note({"k": "epoch_call", "n": number, "used": 1})
