"""Notes whether the script gives the optimizer's gradients to all_reduce one by one, as a job without DDP does.

One early step is looked at: what all_reduce was given in it is compared with the gradients that the optimizer uses.
Some scripts reduce a copy of each gradient. Copies are known by their shapes, if there is one for each gradient, and if
DDP reduces nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, List, Optional, Tuple

from .. import frames
from ..state import guarded, here
from ..training.step_clock import clock

WATCHED_AFTER = 3
"""The step after this many steps is looked at. Our choice: one in which training is under way."""
REDUCTIONS = frozenset({"all_reduce", "reduce"})
MAX_CALLS = 4096
MIN_GRADIENTS = 2

_given: List[Tuple[int, Any]] = []
"""The address and the shape of each tensor that all_reduce was given in the step."""
_frame: Optional[Any] = None


def reduction_begins(tensor: Any, frame: Any) -> None:
    """Note the memory of a tensor. Only called in the step that is looked at."""
    global _frame
    if len(_given) < MAX_CALLS and hasattr(tensor, "data_ptr"):
        _given.append((tensor.data_ptr(), tensor.shape))
        _frame = frames.describe_user(frame) if _frame is None else _frame


@guarded("hand-made reduction")
def optimizer_begins(optimizer: Any) -> None:
    """Compare what was reduced in this step with the gradients of an optimizer that is about to step."""
    global _frame
    if not _given or here.ring is None:
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    found = len({p.grad.data_ptr() for p in trained}.intersection(address for address, _ in _given))
    copies = 0 if found >= MIN_GRADIENTS or clock.inside.reductions else _copies(trained)
    if max(found, copies) >= MIN_GRADIENTS:
        note = {"k": "hand_reduced", "gradients": max(found, copies), "copied": copies > 0, "frame": _frame}
        here.ring.note(dict(note, at=time.monotonic_ns()))
    _given.clear()
    _frame = None


def _copies(trained: List[Any]) -> int:
    """Return how many gradients there are, if a tensor of the shape of each was reduced, else 0.

    Parameters have these shapes too. A script that averages them reduces no gradients.
    """
    weights = {p.data_ptr() for p in trained}
    shapes = Counter(shape for address, shape in _given if address not in weights)
    missing = Counter(p.grad.shape for p in trained) - shapes
    return 0 if missing else len(trained)
