"""Knows whether a CUDA graph is being captured.

Querying an event or a work, or reading a value, breaks a capture by the same thread. In torch's usual mode it also
breaks a capture by any other thread of the process. So the recorder asks here before it touches a device.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Set

from . import hooks
from .state import sealed, wall
from .wrappers import wraps

# The methods that end a capture. In torch 2.15 the first is a part of the second.
_ENDS = ("capture_end_pre", "capture_end", "reset")
_captured: Set[int] = set()  # ids of the graphs that are being captured, by any thread


def is_capturing() -> bool:
    """Return whether any thread of this process is capturing a CUDA graph."""
    if _captured:
        return True
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not getattr(cuda, "_initialized", False) or not cuda.is_initialized():
        return False
    return bool(cuda.is_current_stream_capturing())


def patch(module: Any) -> None:
    """Patch torch.cuda.graphs.CUDAGraph to follow captures, because no thread can ask whether another one captures."""
    graph = hooks.part(module, "CUDAGraph")
    hooks.put(graph, "capture_begin", functools.partial(_following, True))
    for name in _ENDS:
        hooks.put(graph, name, functools.partial(_following, False), is_api=name != "capture_end")


def _following(begins: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if begins:
                _captured.add(id(self))
            result = original(self, *args, **kwargs)
        except BaseException:
            sealed[wall.gi_running][_forget, self]
            raise
        if not begins:
            sealed[wall.gi_running][_forget, self]
        return result

    return run


def _forget(graph: Any) -> None:
    _captured.discard(id(graph))
