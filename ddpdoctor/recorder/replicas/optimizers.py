"""Records which optimizers were made, and which parameters a module got too late for an optimizer to hold them.

Nothing is kept about parameters that existed before the first optimizer, as most do.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Dict, List, Tuple

from .. import hooks
from ..state import check_every, guarded, here
from ..storage import fingerprint_layout
from ..wrappers import around
from .tensors import held_by

_numbers: Any = weakref.WeakKeyDictionary()
"""By optimizer: its number in the order of creation, from 1."""
_made = 0
_came_after: Any = None
"""By parameter that a module got after the first optimizer: how many optimizers existed then."""


def patch_optimizer(module: Any) -> None:
    """Count the optimizers that are made."""
    if not check_every():
        return
    hooks.put(module.Optimizer, "__init__", lambda original: around(original, after=_count))


@guarded("optimizer made")
def _count(optimizer: Any) -> None:
    global _came_after, _made
    if here.ring is None:
        return
    _made += 1
    _numbers[optimizer] = _made
    if _made == 1:
        from torch.utils.weak import WeakTensorKeyDictionary

        _came_after = WeakTensorKeyDictionary()
        module = sys.modules["torch.nn.modules.module"]
        if hooks.has(module, "register_module_parameter_registration_hook"):
            module.register_module_parameter_registration_hook(_registered)
            hooks.write()


@guarded("optimizer made")
def _registered(_module: Any, _name: str, parameter: Any) -> None:
    """Note a parameter that a module gets. Returning None leaves the parameter unchanged."""
    if parameter is not None:
        _came_after[parameter] = _made


def optimizers() -> Any:
    """Return the existing optimizers, including those that have made no step."""
    return list(_numbers)


def is_later_than(parameter: Any, optimizer: Any) -> bool:
    """Return whether a module got a parameter only after an optimizer had been made."""
    return optimizer in _numbers and bool(_came_after.get(parameter, 0) >= _numbers[optimizer])


MAX_NAMES = 5
MAX_NAME = 120
MIN_STILL = 2
"""Checks in a row at which a parameter was unchanged. Our choice: one that is trained without an optimizer has changed
by then."""


class Untrained:
    """Finds the parameters of one model that get gradients but that no optimizer changes."""

    def __init__(self) -> None:
        self._still: Dict[str, Tuple[bytes, int]] = {}
        """By name: the parameter's fingerprint, and at how many checks in a row it was the same."""

    def find(self, named: List[Tuple[str, Any]], taken: bytes, optimizer: Any, others: List[Any]) -> Dict[str, Any]:
        """Return the names of such parameters, first those that came after the optimizer that steps now.

        ``taken`` starts with the parameters' fingerprints, in the order of ``named``.
        """
        everybody = [*optimizers(), *others]
        held = {id(tensor) for one in everybody for tensor in held_by(one)}
        still: Dict[str, Tuple[bytes, int]] = {}
        late: List[str] = []
        early: List[str] = []
        for i, (name, tensor) in enumerate(named):
            if id(tensor) in held or not tensor.requires_grad or tensor.grad is None:
                continue
            value = taken[i * fingerprint_layout.FINGERPRINT_SIZE : (i + 1) * fingerprint_layout.FINGERPRINT_SIZE]
            before, times = self._still.get(name, (b"", 0))
            still[name] = (value, times + 1 if value == before else 0)
            if still[name][1] >= MIN_STILL:
                (late if is_later_than(tensor, optimizer) else early).append(name[:MAX_NAME])
        self._still = still
        return {"untrained": (late + early)[:MAX_NAMES], "untrained_count": len(late + early), "late": len(late)}
