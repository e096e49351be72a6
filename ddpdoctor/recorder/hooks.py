"""Puts the recorder's hooks into torch, and notes which of them this version of torch has no place for.

If one hook finds no place, only its own evidence is missing. The other hooks still work.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Tuple

from .state import guarded, here

_found: Dict[str, bool] = {}
"""By hook, in the order in which they were tried: whether torch has what the hook attaches to."""
replaced: List[Tuple[Any, Any]] = []
"""Functions of modules, each with what stands in its place. ``late`` puts them where a script has imported them to."""
_written: Tuple[Any, int] = (None, 0)
"""The ring that the hooks were last written to, and how many were written."""


def put(owner: Any, name: str, around: Callable[[Any], Any], *, is_api: bool = False) -> bool:
    """Replace an attribute with ``around(original)``; return whether that worked.

    With ``is_api`` a missing attribute is not noted, because no script can call it.
    """
    if not has(owner, name, is_api=is_api):
        return False
    try:
        original = getattr(owner, name)
        wrapper = around(original)
        setattr(owner, name, wrapper)
    except Exception as error:  # noqa: BLE001 - the recorder's wall: the other hooks still go in
        here.failed(label(owner, name), error)
        return False
    if isinstance(owner, type(os)):
        replaced.append((original, wrapper))
    return True


def has(owner: Any, name: str, *, is_api: bool = False) -> bool:
    """Return whether torch has an attribute that the recorder needs, and note it.

    If the owner itself is missing, that was noted already.
    """
    if owner is None:
        return False
    found = hasattr(owner, name)
    if found or not is_api:
        note(label(owner, name), found)
    return found


def part(owner: Any, name: str) -> Any:
    """Return a class or module of torch that hooks go into, or None if this torch does not have it."""
    return getattr(owner, name) if has(owner, name) else None


def note(hook: str, found: bool) -> None:
    """Note whether torch has a place for a hook."""
    _found[hook] = found


def label(owner: Any, name: str) -> str:
    """Return the name of a hook: ``Work.wait``, ``distributed_c10d.new_group``."""
    return "%s.%s" % (str(getattr(owner, "__qualname__", owner.__name__)).rpartition(".")[2], name)


def note_modules(torch: Any, names: List[str]) -> None:
    """Note the modules that this torch does not have. A hook that waits for one would otherwise wait unnoticed."""
    root = os.path.dirname(torch.__file__)
    if not os.path.isdir(root):  # torch comes from an archive
        return
    for name in names:
        path = os.path.join(root, *name.split(".")[1:])
        if not os.path.exists(path + ".py") and not os.path.isdir(path):
            note(name, found=False)


@guarded("hooks")
def write() -> None:
    """Write the hooks noted since the last call. A process that becomes a rank later writes all of them then."""
    global _written
    ring, count = _written
    if here.ring is None or not here.is_rank:
        return
    since = count if ring is here.ring else 0
    if since < len(_found):
        here.ring.note(dict(entry(since), at=time.monotonic_ns()))
    _written = (here.ring, len(_found))


def entry(since: int = 0) -> Dict[str, Any]:
    """Return the journal entry for the hooks from number ``since`` on."""
    fresh = list(_found.items())[since:]
    return {
        "k": "hooks",
        "found": [hook for hook, found in fresh if found],
        "lacks": [hook for hook, found in fresh if not found],
    }


here.on_start.append(write)
