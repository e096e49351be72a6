"""Puts the recorder's hooks into modules right after the script imports them. It imports no module itself."""

from __future__ import annotations

import os
import sys
import time

from .state import guarded, here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Tuple

# By hook, in the order in which they were tried: whether torch has what the hook attaches to.
_found: Dict[str, bool] = {}
# Functions of modules, each with what stands in its place. ``start`` puts them where a script has imported them to.
replaced: List[Tuple[Any, Any]] = []
_written: Tuple[Any, int] = (None, 0)  # the ring that the hooks were last written to, and how many were written


def put(owner: Any, name: str, around: Callable[[Any], Any], *, is_api: bool = False) -> bool:
    """Replace an attribute with ``around(original)``; return whether that worked. A missing ``is_api`` is not noted."""
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


def has(owner: Any, *names: str, is_api: bool = False) -> bool:
    """Return whether torch has attributes that we need, and note each. A missing owner was noted already."""
    found = [] if owner is None else [hasattr(owner, name) for name in names]
    for name, is_there in zip(names, found):
        if is_there or not is_api:
            note(label(owner, name), is_there)
    return all(found) and owner is not None


def part(owner: Any, name: str) -> Any:
    """Return a class or module of torch that gets hooks, or None if this torch does not have it."""
    return getattr(owner, name) if has(owner, name) else None


def note(hook: str, found: bool) -> None:
    _found[hook] = found


def label(owner: Any, name: str) -> str:
    return "%s.%s" % (str(getattr(owner, "__qualname__", owner.__name__)).rpartition(".")[2], name)


@guarded("hooks")
def write() -> None:
    global _written
    ring, count = _written
    if here.ring is None or not here.is_rank:
        return
    since = count if ring is here.ring else 0
    if since < len(_found):
        here.ring.note(dict(entry(since), at=time.monotonic_ns()))
    _written = (here.ring, len(_found))


def entry(since: int = 0) -> Dict[str, Any]:
    fresh = list(_found.items())[since:]
    lacks = [hook for hook, found in fresh if not found]
    return {"k": "hooks", "found": [hook for hook, found in fresh if found], "lacks": lacks}


here.on_start.append(write)
patches: Dict[str, Callable[[Any], None]] = {}  # by module: the function that patches it once it is imported


class PatchingFinder:
    """Finds the modules of ``patches`` as Python would, and patches them after they have run."""

    @staticmethod
    @guarded("import")
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec with a loader that also applies the patch, or None for any other module."""
        patch = patches.get(name)
        if patch is None:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        loader = getattr(spec, "loader", None)
        if loader is None:
            return None
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            try:
                run(module)
            except BaseException as error:
                from .wrappers import hide_own_frames

                hide_own_frames(error)
                raise
            apply(name, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            return None
        return spec


def apply(name: str, module: Any) -> None:
    """Patch one module. A failure is recorded, and may leave the module half patched."""
    try:
        patches[name](module)
        write()
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("patch " + name, error)


def when_there(name: str, patch: Callable[[Any], None]) -> None:
    patches[name] = patch
    module = sys.modules.get(name)
    if module is not None:
        apply(name, module)
