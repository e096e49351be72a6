"""Records at which step a process last saved something to a file with torch.save, as scripts do with a checkpoint."""

from __future__ import annotations

import os
from typing import Any, Callable

from .. import hooks
from ..state import guarded, here
from ..wrappers import wraps


def patch(module: Any) -> None:
    """Put a record around ``torch.serialization.save``: ``torch.save``, which distributed checkpoints call too."""
    hooks.put(module, "save", _recorded)


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(obj, f, *args, **kwargs)
        _note(f)
        return result

    return save


@guarded("save")
def _note(file: Any) -> None:
    """Note the step. What is saved into a buffer may be meant for another rank, and not for a disk."""
    if here.ring is not None and here.is_rank and (isinstance(file, (str, os.PathLike)) or hasattr(file, "name")):
        here.ring.set("saves", here.ring.get("saves") + 1)
        here.ring.set("saved_steps", here.ring.get("steps"))
