"""Counts what collectives of objects do in Python as a part of the collective.

``all_gather_object`` and its like pickle objects, send the bytes, and unpickle what came. On a CPU pickling can take
longer than sending. Without the call it would not be there, so it is no computation of the step.
"""

from __future__ import annotations

import _thread
import sys
import time
from typing import Any, Callable

from .. import hooks
from ..state import guarded, here, sealed, wall
from ..training.step_clock import clock
from ..wrappers import hide_own_frames, wraps

SHARED = frozenset({"all_gather_object", "broadcast_object_list", "scatter_object_list"})
"""Calls in which all ranks wait for the pickling, and unpickle alike. In ``gather_object`` one rank alone unpickles:
the others go on, and wait for it later as for any slow rank."""
HELPERS = ("_object_to_tensor", "_tensor_to_object")

_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns


def count(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a helper of torch that pickles or unpickles, and that counts its time in the calls of ``SHARED``."""

    @wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if clock.waiting or _get_ident() != here.main_thread or _caller(sys._getframe(1)) not in SHARED:
            return original(*args, **kwargs)
        began = _now_ns()
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][hide_own_frames, error]
            raise
        finally:
            sealed[wall.gi_running][_add, began]

    return counted


def _add(began_ns: int) -> None:
    clock.waits[clock.phase] += _now_ns() - began_ns


@guarded("objects")
def _caller(frame: Any) -> str:
    """Return the function that calls a helper. Before Python 3.12 a list comprehension in it has a frame of its own."""
    is_inside = frame.f_code.co_name.startswith("<") and frame.f_back is not None
    return str((frame.f_back if is_inside else frame).f_code.co_name)


def patch(module: Any) -> None:
    """Count the time of the helpers of torch.distributed.distributed_c10d."""
    for name in HELPERS:
        hooks.put(module, name, count)
