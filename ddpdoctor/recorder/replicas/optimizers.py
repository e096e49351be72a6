"""Which optimizers were made, and which parameters a module was given only after one: it cannot hold those.

Nothing is kept of parameters that were there before the first optimizer, as most are.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Dict

from .. import hooks
from ..state import check_every, guarded, here
from ..wrappers import wraps

MAX_KEPT = 65536
"""Parameters that came after an optimizer. Ours: some 10 MB at most."""

_numbers: Any = weakref.WeakKeyDictionary()
"""By optimizer: the how-many-th that was made, from 1."""
_made = 0
_came_after: Dict[int, int] = {}
"""By id of a parameter: how many optimizers had been made when a module was given it."""


def patch_optimizer(module: Any) -> None:
    """Count the optimizers that are made."""
    if not check_every():
        return
    hooks.put(module.Optimizer, "__init__", _counting)


def _counting(original: Any) -> Any:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for the original
        original(self, *args, **kwargs)
        _count(self)

    return __init__


@guarded("optimizer made")
def _count(optimizer: Any) -> None:
    global _made
    if here.ring is None:
        return
    _made += 1
    _numbers[optimizer] = _made
    if _made == 1:
        module = sys.modules["torch.nn.modules.module"]
        if hooks.has(module, "register_module_parameter_registration_hook"):
            module.register_module_parameter_registration_hook(_registered)
            hooks.tell()


def _registered(_module: Any, _name: str, parameter: Any) -> None:
    """Note a parameter that a module is given. To return nothing leaves it as it is."""
    if parameter is not None and len(_came_after) < MAX_KEPT:
        _came_after[id(parameter)] = _made


def optimizers() -> Any:
    """Return the optimizers that are there, those included that have made no step."""
    return list(_numbers)


def is_later_than(parameter: Any, optimizer: Any) -> bool:
    """Return whether a module was given a parameter only after an optimizer had been made."""
    return bool(_came_after.get(id(parameter), 0) >= _numbers.get(optimizer, MAX_KEPT))
