"""Records when, and at which step, a process last saved to a file with torch.save, as scripts do with a checkpoint."""

from __future__ import annotations

import os
import time
from typing import Any, Callable

from .. import hooks
from ..state import guarded, here, sealed, wall
from ..wrappers import wraps


def patch(module: Any) -> None:
    """Put a record around ``torch.serialization.save``: ``torch.save``, which distributed checkpoints call too."""
    hooks.put(module, "save", _recorded)


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_file(f):
            return original(obj, f, *args, **kwargs)
        _begin()
        try:
            result = original(obj, f, *args, **kwargs)
        finally:
            sealed[wall.gi_running][_end,]
        _count()
        return result

    return save


def _is_file(file: Any) -> bool:
    """Tell whether this goes to a disk. What is saved into a buffer may be meant for another rank."""
    return isinstance(file, (str, os.PathLike)) or hasattr(file, "name")


@guarded("save")
def _begin() -> None:
    if here.ring is not None and here.is_rank:
        here.ring.set("save_began_ns", time.monotonic_ns())


@guarded("save")
def _end() -> None:
    if here.ring is not None and here.is_rank:
        here.ring.set("save_ended_ns", time.monotonic_ns())


@guarded("save")
def _count() -> None:
    if here.ring is not None and here.is_rank:
        here.ring.set("saves", here.ring.get("saves") + 1)
        here.ring.set("saved_steps", here.ring.get("steps"))
