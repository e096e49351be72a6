"""Records what a rank's speed depends on: threads and cores, the framework, DataParallel."""

from __future__ import annotations

import os
import sys
import time
import weakref
from typing import Any

from .. import frames, hooks
from ..state import guarded, here
from ..wrappers import around

NOTED_AT_STEP = 5
"""The step after which threads and frameworks are noted. Our choice: a script has set its threads by then."""
MAX_DATA_PARALLEL = 8
FRAMEWORKS = {
    "lightning": ("lightning.pytorch.trainer", "pytorch_lightning.trainer"),
    "transformers": ("transformers.trainer",),
    "accelerate": ("accelerate.accelerator",),
}
"""By framework: the modules of which one is loaded where a script trains with it."""

_built_at: Any = weakref.WeakKeyDictionary()
"""By DataParallel that has not trained yet: the line that built it."""


def patch_data_parallel(module: Any) -> None:
    """Patch torch.nn.parallel.data_parallel: note where a model is wrapped in DataParallel."""
    owner = hooks.part(module, "DataParallel")
    hooks.put(owner, "__init__", lambda original: around(original, after=_built))
    hooks.put(owner, "forward", lambda original: around(original, before=_used))


@guarded("data parallel")
def _built(model: Any) -> None:
    if here.ring is not None and len(_built_at) < MAX_DATA_PARALLEL:
        _built_at[model] = frames.describe_user(sys._getframe())


@guarded("data parallel")
def _used(model: Any) -> None:
    """Note a model that trains, once. One that was only built, to load a checkpoint, is of no account."""
    import torch

    frame = _built_at.get(model)
    if frame is None or here.ring is None or not torch.is_grad_enabled() or not model.training:
        return
    del _built_at[model]
    devices = len(getattr(model, "device_ids", ()) or ())
    here.ring.note({"k": "data_parallel", "devices": devices, "frame": frame, "at": time.monotonic_ns()})


@guarded("surroundings")
def note() -> None:
    """Write the number of threads and cores, and the frameworks that are loaded."""
    if here.ring is None:
        return
    import torch

    loaded = [name for name, modules in FRAMEWORKS.items() if any(module in sys.modules for module in modules)]
    entry = {
        "k": "surroundings",
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "frameworks": loaded,
        "at": time.monotonic_ns(),
    }
    here.ring.note(entry)
