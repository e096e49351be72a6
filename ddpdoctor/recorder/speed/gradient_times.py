"""Notes when each gradient of a DDP model is ready in backward, and the buckets in which DDP reduces them.

DDP's reducer keeps the time at which each gradient was ready, counted from the end of forward. Reading it costs 1 to 10
microseconds, so one timed reduction in eight is read. Only on CPU are they the times of the computation: on a GPU the
host runs ahead.
"""

from __future__ import annotations

import base64
import json
import time
import weakref
import zlib
from typing import Any, Dict, List, Optional

from ..state import guarded, here, shielded

FIRST = 4
"""The first reduction that is read, of each model. DDP builds its buckets anew before the second forward."""
ONE_IN = 8
FIRST_NOTE = 3
"""Readings before the first note. Further notes follow at doublings, so that a killed job has nearly as many."""
MAX_READINGS = 16
"""Readings of each model that are kept, the latest. Our choice: enough for a median of each tensor."""
MAX_TENSORS = 4096
"""Larger models have neighboring tensors folded into one, which is ready when the last of them is."""
MAX_MODELS = 16
MAX_BYTES = 32 * 1024
"""Room for the notes of all models in the journal of 512 KiB."""
LAST_BYTES = 16 * 1024
"""The part of ``MAX_BYTES`` that is reserved for the notes at the end."""

_INTS = {
    "bucket_cap_bytes": "cap",
    "find_unused_parameters": "finds_unused",
    "static_graph": "static",
    "gradient_as_bucket_view": "view",
    "broadcast_buffers": "buffers",
}


class Model:
    """What was read of one DDP model."""

    def __init__(self, ddp: Any, number: int) -> None:
        self.number = number
        self.ring = here.ring
        self.group = str(ddp.process_group.group_name)
        self.owner = weakref.ref(ddp, shielded("gradient times", lambda _: _ended(self)))
        sizes = [p.numel() * p.element_size() for p in _reduced(ddp)]
        self.tensors = len(sizes)
        self.fold = -(-len(sizes) // MAX_TENSORS) or 1
        self.sizes = _folded(sizes, self.fold, sum)
        self.timed = self.read = self.noted = 0
        self.readings: List[List[int]] = []
        """The last readings: microseconds from the start of backward, by tensor; -1 if it had no gradient."""
        self.computed_us: List[int] = []
        self.exposed_us: List[int] = []
        self.unused_bytes = 0
        """The most bytes of parameters that went unused in one of the reductions that were read."""
        self.same_unused = True
        """The same parameters went unused in all steps. DDP itself compares each step with the one before."""
        self.buckets: List[int] = []
        self.about: Dict[str, Any] = {}


_models: Dict[int, Model] = {}
"""By id of the DDP model."""
_count = 0
_bytes = 0
reads_all = False
"""Read every timed reduction: a trial has few with the settings of the script."""
is_paused = False
"""A trial has given DDP other settings, so its times are not those of the script."""


@guarded("gradient times")
def reduced(ddp: Any) -> Optional[List[int]]:
    """Return when each gradient of the backward that has just ended was ready, or None if this one is not read.

    The times are nanoseconds from the end of forward, in the order of the model's parameters.
    """
    global _count
    if is_paused:
        return None
    model = _models.get(id(ddp))
    if model is None or model.ring is not here.ring:
        if _count >= MAX_MODELS:
            return None
        _count += 1
        model = _models[id(ddp)] = Model(ddp, _count)
    model.timed += 1
    model.same_unused = model.same_unused and ddp.reducer._ddp_graph_static()
    if model.timed < FIRST or (model.timed % ONE_IN != FIRST and not reads_all):
        return None
    ready: List[int] = ddp.reducer.get_backward_stats()
    return ready if len(ready) == model.tensors else None


@guarded("gradient times")
def settled(ddp: Any, ready_ns: List[int], reduction: Any, waited_ns: int) -> None:
    """Keep what ``reduced`` returned, once DDP's own times of that backward are known."""
    model = _models.get(id(ddp))
    if model is None:
        return
    data = reduction.logger._get_ddp_logging_data()
    started_ns = data.ints_map["backward_compute_time_start"] - reduction.wall_offset_ns
    early_ns = reduction.backward_ns - started_ns
    ready = [(ns - early_ns) // 1000 if ns > early_ns else -1 for ns in ready_ns]
    _keep(model.readings, _folded(ready, model.fold, max))
    _keep(model.computed_us, (reduction.ended_ns - waited_ns - reduction.backward_ns) // 1000)
    _keep(model.exposed_us, waited_ns // 1000)
    model.read += 1
    model.unused_bytes = max(model.unused_bytes, data.ints_map.get("unused_parameter_size", 0))
    model.about = {key: int(data.ints_map[name]) for name, key in _INTS.items() if name in data.ints_map}
    model.about["static"] = int(data.ints_map.get("static_graph", 0))
    model.buckets = _buckets(data.strs_map)
    if model.read == FIRST_NOTE or model.read >= 2 * model.noted > 0:
        _note(model, MAX_BYTES - LAST_BYTES)


@guarded("gradient times")
def settle_all() -> None:
    """Note what was read of each model, because the job ends or its groups do."""
    for model in list(_models.values()):
        _note_last(model)


@guarded("gradient times")
def _ended(model: Model) -> None:
    """Note what was read of a model that is gone."""
    for key in [key for key, one in _models.items() if one is model]:
        del _models[key]
    _note_last(model)


def _note_last(model: Model) -> None:
    if model.ring is here.ring and model.read > model.noted:
        _note(model, MAX_BYTES)


def _reduced(ddp: Any) -> List[Any]:
    ignored = ddp.parameters_to_ignore
    return [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def _folded(values: List[int], fold: int, into: Any) -> List[int]:
    return values if fold == 1 else [into(values[i : i + fold]) for i in range(0, len(values), fold)]


def _keep(kept: List[Any], value: Any) -> None:
    kept.append(value)
    del kept[:-MAX_READINGS]


def _buckets(words: Any) -> List[int]:
    """Return the sizes of the buckets in the order in which they are reduced."""
    sizes = words.get("rebuilt_bucket_sizes") or words.get("bucket_sizes", "")
    return [int(size) for size in sizes.split(",") if size.strip().isdigit()]


def _note(model: Model, space: int) -> None:
    """Write a note if there is space for it. The last note of a model counts."""
    global _bytes
    columns = {
        "sizes": model.sizes,
        "ready": [_middle(list(times)) for times in zip(*model.readings)],
        "buckets": model.buckets,
    }
    text = json.dumps(columns, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(text, 6)).decode("ascii")
    if _bytes + len(packed) > space or here.ring is None:
        return
    entry = {
        "k": "gradient_times",
        "n": model.number,
        "group": model.group,
        "at": time.monotonic_ns(),
        "tensors": model.tensors,
        "readings": model.read,
        "reductions": model.timed,
        "compute_us": _middle(model.computed_us),
        "exposed_us": _middle(model.exposed_us),
        "same_unused": int(model.same_unused),
        "columns": packed,
    }
    if here.ring.note(dict(model.about, **dict(entry, unused_bytes=model.unused_bytes))):
        model.noted = model.read
        _bytes += len(packed)


def _middle(values: List[int]) -> int:
    return sorted(values)[len(values) // 2]
