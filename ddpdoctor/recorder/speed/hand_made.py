"""Notes whether the script gives the optimizer's gradients to all_reduce one by one, as a job without DDP does.

One early step is looked at: what all_reduce was given in it is compared with the gradients that the optimizer uses.
"""

from __future__ import annotations

import time
from typing import Any, List, Optional

from .. import frames
from ..state import guarded, here

WATCHED_AFTER = 3
"""The step after this many steps is looked at. Our choice: one in which training is under way."""
REDUCTIONS = frozenset({"all_reduce", "reduce"})
MAX_CALLS = 4096
MIN_GRADIENTS = 2

_given: List[int] = []
"""The addresses that all_reduce was given in the step."""
_frame: Optional[Any] = None


def reduction_begins(tensor: Any, frame: Any) -> None:
    """Note the memory of a tensor. Only called in the step that is looked at."""
    global _frame
    if len(_given) < MAX_CALLS and hasattr(tensor, "data_ptr"):
        _given.append(tensor.data_ptr())
        _frame = frames.describe_user(frame) if _frame is None else _frame


@guarded("hand-made reduction")
def optimizer_begins(optimizer: Any) -> None:
    """Compare what was reduced in this step with the gradients of an optimizer that is about to step."""
    global _frame
    if not _given or here.ring is None:
        return
    gradients = {p.grad.data_ptr() for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    found = len(gradients.intersection(_given))
    if found >= MIN_GRADIENTS:
        here.ring.note({"k": "hand_reduced", "gradients": found, "frame": _frame, "at": time.monotonic_ns()})
    _given.clear()
    _frame = None
