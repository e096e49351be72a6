"""Puts the recorder's hooks into torch, and notes which of them this torch has no place for.

A hook that finds no place costs what it would have told, and none of the others.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Tuple

from .state import guarded, here

_found: Dict[str, bool] = {}
"""By hook, in the order in which they were tried: whether torch has what it holds on to."""
_told: Tuple[Any, int] = (None, 0)
"""The ring that was told, and of how many hooks."""


def put(owner: Any, name: str, around: Callable[[Any], Any], *, is_api: bool = False) -> bool:
    """Put ``around(original)`` in the place of an attribute; return whether there is one.

    Where ``is_api``, nothing is lost without it: no script can call it.
    """
    if not has(owner, name, is_api=is_api):
        return False
    try:
        setattr(owner, name, around(getattr(owner, name)))
    except Exception as error:  # noqa: BLE001 - the recorder's wall: the other hooks go in
        here.failed(label(owner, name), error)
        return False
    return True


def has(owner: Any, name: str, *, is_api: bool = False) -> bool:
    """Return whether torch has something that the recorder needs. Of an owner that is missing, that is told alone."""
    if owner is None:
        return False
    found = hasattr(owner, name)
    if found or not is_api:
        note(label(owner, name), found)
    return found


def part(owner: Any, name: str) -> Any:
    """Return a class or module of torch's that hooks go into, None where there is none."""
    return getattr(owner, name) if has(owner, name) else None


def note(hook: str, found: bool) -> None:
    """Note of a hook whether torch has a place for it."""
    _found[hook] = found


def label(owner: Any, name: str) -> str:
    """Return what a hook is called: ``Work.wait``, ``distributed_c10d.new_group``."""
    return "%s.%s" % (str(getattr(owner, "__qualname__", owner.__name__)).rpartition(".")[2], name)


def note_modules(torch: Any, names: List[str]) -> None:
    """Note modules that hooks wait for and this torch does not have: they would wait in silence."""
    root = os.path.dirname(torch.__file__)
    if not os.path.isdir(root):  # torch comes from an archive
        return
    for name in names:
        path = os.path.join(root, *name.split(".")[1:])
        if not os.path.exists(path + ".py") and not os.path.isdir(path):
            note(name, found=False)


@guarded("hooks")
def tell() -> None:
    """Write what was found since the last time. A process that becomes a rank later tells all of it then."""
    global _told
    ring, count = _told
    if here.ring is None or not here.is_rank:
        return
    since = count if ring is here.ring else 0
    if since < len(_found):
        here.ring.note(dict(entry(since), at=time.monotonic_ns()))
    _told = (here.ring, len(_found))


def entry(since: int = 0) -> Dict[str, Any]:
    """Return what was found, from the hook of this number on."""
    fresh = list(_found.items())[since:]
    return {
        "k": "hooks",
        "found": [hook for hook, found in fresh if found],
        "lacks": [hook for hook, found in fresh if not found],
    }


here.on_start.append(tell)
