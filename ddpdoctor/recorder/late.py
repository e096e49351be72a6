"""Starts the recorder in a Python that already runs: ``ddpdoctor.watch`` was called, and no ``wrap`` prepared it.

torch is loaded by then, and other modules have names of their own for the functions that the hooks replace:
``torch.distributed.all_reduce`` is one, and ``from torch.distributed import all_reduce`` makes another.
"""

from __future__ import annotations

import sys

from . import start
from .state import guarded, here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

_PACKAGE = __package__ or ""


def is_foreign() -> bool:
    """Return whether Python loaded a recorder at its start, because this process belongs to a job that is watched."""
    return getattr(sys, "_ddpdoctor_recorder", here) is not here


def begin(folder: str) -> None:
    """Record this process in a run folder from now on. A former folder keeps what it has."""
    if here.ring is not None and here.folder == folder:
        return
    if here.ring is not None:
        here.kept.append(here.ring)
        here.ring = None
    here.folder = folder
    if hasattr(sys, "_ddpdoctor_recorder"):
        here.start(is_rank=here.is_rank)
    else:
        start.hook_in()
        (start.start_rank if start.is_rank() else start.start_helper)()
        _replace_copies()
    _join_group()


@guarded("running group")
def _join_group() -> None:
    training = sys.modules.get(_PACKAGE + ".training.patches")
    if training is not None:
        training.join_running_group()


@guarded("copies")
def _replace_copies() -> None:
    """Put each replaced function in the place of the original, in all modules that are loaded."""
    hooks = sys.modules.get(_PACKAGE + ".hooks")
    if hooks is None:
        return
    wrapper_of = {id(original): wrapper for original, wrapper in hooks.replaced}
    for name, module in list(sys.modules.items()):
        if not name.startswith(_PACKAGE):
            _replace_in(getattr(module, "__dict__", None), wrapper_of)
    functional = sys.modules.get("torch.distributed._functional_collectives")
    # torch.compile knows the functions that it can trace by this table.
    traced = getattr(functional, "traceable_collective_remaps", {})
    traced.update({_last(wrapper_of, one): traced[one] for one in list(traced) if id(one) in wrapper_of})


def _replace_in(names: Any, wrapper_of: Dict[int, Any]) -> None:
    if type(names) is not dict:
        return
    for name, value in list(names.items()):
        if id(value) in wrapper_of:
            names[name] = _last(wrapper_of, value)


def _last(wrapper_of: Dict[int, Any], function: Any) -> Any:
    """Return the outermost wrapper, where one hook stands around another."""
    while id(function) in wrapper_of:
        function = wrapper_of[id(function)]
    return function
