"""Applies a patch to a module right after the script imports it. It imports no module itself."""

from __future__ import annotations

import sys

from .state import guarded, here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict

patches: Dict[str, Callable[[Any], None]] = {}
"""By module: the function that patches it once it is imported."""


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
        hooks = sys.modules.get(__package__ + ".hooks")
        if hooks is not None:
            hooks.write()
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("patch " + name, error)


def install() -> None:
    """Watch imports from now on, and patch the modules that are already imported."""
    sys.meta_path.insert(0, PatchingFinder)
    for name, patch in list(patches.items()):
        when_there(name, patch)


def when_there(name: str, patch: Callable[[Any], None]) -> None:
    """Patch a module as soon as it is imported, or now if it already is."""
    patches[name] = patch
    module = sys.modules.get(name)
    if module is not None:
        apply(name, module)
