"""Throws away what a script saves during a trial: torch.save writes to a file without a name."""

from __future__ import annotations

import os
from typing import Any, Callable, Set

from .. import hooks
from ..state import pass_on
from ..wrappers import wraps

_thrown_away: Set[str] = set()
"""Paths that torch.save was given. What is there is not what the script has just saved."""


def patch(module: Any) -> None:
    """Divert ``torch.serialization.save``, which ``torch.save`` is, and moves of files that it would have written.

    What is saved into an open file or a buffer is not diverted: it may be meant for another rank, and not for a disk.
    """
    hooks.put(module, "save", _diverted)
    for name in ("replace", "rename"):
        hooks.put(os, name, _moved)


def _diverted(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, (str, os.PathLike)):
            return original(obj, f, *args, **kwargs)
        import tempfile

        _thrown_away.add(_full(f))
        with tempfile.TemporaryFile() as nowhere:  # writing takes as long as in the script
            return original(obj, nowhere, *args, **kwargs)

    return save


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scripts save under another name first. An older file of that name must not take the checkpoint's place."""

    def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        if _thrown_away and _full(src) in _thrown_away:
            _thrown_away.add(_full(dst))
        else:
            original(src, dst, *args, **kwargs)

    move.__name__ = move.__qualname__ = original.__name__
    move.__doc__ = original.__doc__
    return move


def _full(path: Any) -> str:
    try:
        return os.path.abspath(os.fsdecode(path))
    except TypeError as error:  # a script may give anything
        pass_on(error)
        return ""
