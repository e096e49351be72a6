"""Notes a sampler whose ``set_epoch`` is called every epoch but that no loader uses."""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any, Dict

from .. import frames, hooks
from ..state import check_every, guarded, here
from ..wrappers import around
from . import digests, samplers

CALLS = 2
"""Calls after which a sampler without a loader is noted. By the second call the first epoch's loop is over."""
MAX_NOTED = 8

_counts: Any = weakref.WeakKeyDictionary()
"""By sampler: how often its epoch was set."""
_noted: Dict[int, Any] = {}
"""By the number of the note: a weak reference to the sampler."""


def patch(module: Any) -> None:
    """Watch ``set_epoch`` of torch's DistributedSampler and its subclasses."""
    if check_every():
        hooks.put(module.DistributedSampler, "set_epoch", lambda original: around(original, after=_called))
        samplers.on_use.append(_used)


@guarded("epoch calls")
def _called(sampler: Any) -> None:
    hashable = getattr(type(sampler), "__hash__", None) is not None
    if not here.is_rank or here.ring is None or not hashable or sampler in samplers.used:
        return
    count = _counts[sampler] = _counts.get(sampler, 0) + 1
    if count == CALLS and len(_noted) < MAX_NOTED:
        number = len(_noted) + 1
        _noted[number] = weakref.ref(sampler)
        samples = samplers.length_of(digests.attributes(sampler).get("dataset"))
        entry = {"k": "epoch_call", "n": number, "N": samples, "at": time.monotonic_ns()}
        here.ring.note(dict(entry, site=frames.describe_user(sys._getframe())))


def _used(sampler: Any) -> None:
    """Withdraw a note, because a loader uses the sampler after all."""
    for number, known in _noted.items():
        if known() is sampler and here.ring is not None:
            here.ring.note({"k": "epoch_call", "n": number, "used": 1})
