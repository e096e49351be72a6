"""Throws away what a script saves during a trial: torch.save writes to a file without a name."""

from __future__ import annotations

import os
from typing import Any, Callable

from .. import hooks
from ..wrappers import wraps


def patch(module: Any) -> None:
    """Divert ``torch.serialization.save``, which ``torch.save`` is.

    What is saved into an open file or a buffer is not diverted: it may be meant for another rank, and not for a disk.
    """
    hooks.put(module, "save", _diverted)


def _diverted(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, (str, os.PathLike)):
            return original(obj, f, *args, **kwargs)
        import tempfile

        with tempfile.TemporaryFile() as nowhere:  # writing takes as long as in the script
            return original(obj, nowhere, *args, **kwargs)

    return save
