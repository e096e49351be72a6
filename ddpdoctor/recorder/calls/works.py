"""Ends the records of asynchronous calls when their Work objects are waited for or found to have completed."""

from __future__ import annotations

import _thread
import sys
import time
import weakref
from typing import Any, Callable, Dict, Tuple

from .. import capture
from ..state import here, pass_on, sealed, wall
from ..storage import ring_layout
from ..training.step_clock import clock
from ..wrappers import wraps
from . import records
from .waiting import begin_wait, end_wait

MAX_HANDED_OUT = 1024
"""Works that are followed at a time. Our choice: code that never waits for them must not fill memory."""

_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns
_MAIN = ring_layout.FLAG_MAIN


_NOT_HANDED_OUT: Tuple[Any, int] = (lambda: None, 0)
_handed_out: Dict[int, Tuple[Any, int]] = {}
"""By id of the work, in the order of the calls: a weak reference to it, and the record of its call."""


def hand_out(work: Any, index: int) -> None:
    """Leave the end of a record to the Work that its call returned. If there are too many, the record ends at once.

    Then the older ones are followed, because the other calls wait for the oldest.
    """
    if _handed_out:
        settle()
        gone = _handed_out.pop(id(work), None)
        if gone is not None:
            records.ended(gone[1])
        elif len(_handed_out) >= MAX_HANDED_OUT:
            records.ended(index)
            return
    _handed_out[id(work)] = (weakref.ref(work), index)


def settle() -> None:
    """End the records of asynchronous calls that have completed, oldest first, up to the first that has not.

    Does nothing while a CUDA graph is being captured.
    """
    ring = here.ring
    if not _handed_out or ring is None or capture.is_capturing():
        return
    while _handed_out:
        key = next(iter(_handed_out), 0)
        reference, index = _handed_out.get(key, _NOT_HANDED_OUT)  # the sampler's thread may have removed it
        work = reference()
        if work is not None and not _has_ended(work):
            return
        if _handed_out.pop(key, None) is not None:
            ring.end(index)


def _has_ended(work: Any) -> bool:
    """Return whether a work has completed, or raises when asked because it was aborted or its device failed."""
    try:
        return bool(work.is_completed())
    except Exception as error:  # noqa: BLE001 - the operation has failed, and the script gets its own error
        pass_on(error)
        return True


def wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Work.wait`` with a record of which call is waited for."""

    @wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        index = since = call = 0
        # A synchronous call waits for its own work, and that wait is already recorded.
        if _handed_out or not clock.waiting:
            try:
                index, since, call = _begin(self, sys._getframe(1))
                if since:
                    clock.waiting = True
            except Exception as error:
                if not sealed[wall.gi_running]["wait", error]:
                    raise
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][end_wait, since, index > 0]
            sealed[wall.gi_running][records.failed, index, "work_wait", error]
            raise
        if index or since:
            try:
                _end(self, index, since, call)
            except BaseException as error:
                sealed[wall.gi_running][end_wait, since, False]
                sealed[wall.gi_running][records.ended, index]
                if not sealed[wall.gi_running]["wait", error]:
                    raise
        return result

    return wait


def _begin(work: Any, frame: Any) -> Tuple[int, int, int]:
    """Return the record of the wait, when the main thread began to wait, and the record of the call; 0 for none."""
    ring = here.ring
    reference, call = _handed_out.get(id(work), _NOT_HANDED_OUT)
    if ring is None or reference() is not work:
        return 0, begin_wait(), 0
    is_main = _get_ident() == here.main_thread
    waits = is_main and not clock.waiting
    kind = records.kind_of(ring, frame, "work_wait", flags=_MAIN if is_main else 0)
    now = _now_ns()
    index = ring.begin(kind.packed, call, now, waits and not clock.phases)
    return index, now if waits else 0, call


def _end(work: Any, index: int, since_ns: int, call: int) -> None:
    """End the records of a wait and of its call. After a wait with a time limit the call may still be running."""
    now = _now_ns()
    end_wait(since_ns, index > 0, now)
    if index and here.ring is not None:
        here.ring.end(index, ended_ns=now)
        if not capture.is_capturing() and _has_ended(work):
            _handed_out.pop(id(work), None)
            here.ring.end(call, ended_ns=now)
