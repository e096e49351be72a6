"""What the sampler of a loader says of how it shares out: its own attributes, whatever library it is from."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional

from .digests import attributes

MAX_NESTED = 6
"""Samplers inside samplers that are looked at."""

used: Any = weakref.WeakSet()
"""Samplers that share out to ranks, of which a loader has begun a pass."""
on_use: List[Callable[[Any], None]] = []
"""What is to be done when one of them is used for the first time."""

_INNER = ("batch_sampler", "sampler", "base_sampler")
_REPLICAS = ("num_replicas", "num_processes", "world_size")
_RANK = ("rank", "process_index")
_SEED = ("seed", "initial_seed")


def describe(loader: Any) -> Optional[Dict[str, Any]]:
    """Return the sampler that shares out to ranks, else the one that the loader was given; None for no indices."""
    chain = list(_chain(loader))
    if not chain:
        return None
    sharing = _sharing(chain)
    if sharing is None:
        plain = _plain(chain)
        return {"type": class_name(plain), "shuffle": _shuffles(plain)}
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
    """Return the epoch that the sampler of a pass has been set to; None where there is none."""
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
    except TypeError:  # of a class without hashes or weak references
        return
    for action in on_use:
        action(sampler)


def length_of(sampler: Any) -> Optional[int]:
    """Return how many samples a sampler shares out, where its dataset says so."""
    dataset: Any = attributes(sampler).get("dataset")
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001 - some have none, or the method and no length
        return None


def class_name(value: Any) -> str:
    """Return the class of an object, with its module."""
    kind = type(value)
    return ("%s.%s" % (kind.__module__, kind.__qualname__))[:200]


def _chain(loader: Any) -> Iterator[Any]:
    """Return the samplers of a loader, the outer ones first."""
    seen = [attributes(loader).get("batch_sampler"), attributes(loader).get("sampler")]
    found = 0
    known = set()
    while seen and found < MAX_NESTED:
        sampler = seen.pop(0)
        if sampler is None or id(sampler) in known or not _is_sampler(sampler):
            continue
        known.add(id(sampler))
        found += 1
        yield sampler
        seen[:0] = [attributes(sampler).get(name) for name in _INNER]


def _is_sampler(value: Any) -> bool:
    return type(value).__name__ != "_InfiniteConstantSampler"


def _sharing(chain: Any) -> Any:
    """Return the first sampler that knows how many ranks there are and which is its own."""
    for sampler in chain:
        given = attributes(sampler)
        if _number(given, _REPLICAS) is not None and _number(given, _RANK) is not None:
            return sampler
    return None


def _plain(chain: Any) -> Any:
    """Return the sampler that decides the order: the first that is not torch's own way of making batches."""
    own = getattr(sys.modules.get("torch.utils.data.sampler"), "BatchSampler", None)
    return next((sampler for sampler in chain if type(sampler) is not own), chain[0])


def _shuffles(sampler: Any) -> Optional[bool]:
    return {"RandomSampler": True, "SequentialSampler": False}.get(type(sampler).__name__)


def _is_standard(loader: Any, sampler: Any) -> bool:
    """Return whether what the loader draws is what torch's DistributedSampler gives, batch by batch."""
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
