"""Marks, for the watcher and the step clock, that the main thread is inside a call that needs other ranks."""

from __future__ import annotations

import _thread
import time

from ..state import here
from ..training.step_clock import clock

_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns


def begin_wait() -> int:
    """Begin to wait; return the time, or 0 if not in the main thread or already waiting.

    It does not raise.
    """
    try:
        if clock.waiting or _get_ident() != here.main_thread:
            return 0
        began = _now_ns()
        if not clock.phases and here.ring is not None:
            here.ring.waits(began)
        clock.waiting = True
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("wait begins", error)
        return 0
    return began


def end_wait(began_ns: int, counts: bool, ended_ns: int = 0) -> None:
    """End a wait. A wait for a single peer does not count, because not all ranks meet. It does not raise."""
    if not began_ns:
        return
    clock.waiting = False
    try:
        if counts:
            clock.waits[clock.phase] += (ended_ns or _now_ns()) - began_ns
        if not clock.phases and here.ring is not None:
            here.ring.waits(0)
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("wait ends", error)


def enter_phase() -> bool:
    """Begin a phase that may need other ranks; return whether ``leave_phase`` must be called."""
    if _get_ident() != here.main_thread:
        return False
    clock.phases += 1
    if clock.phases == 1:
        _write_wait(_now_ns())
    return True


def leave_phase() -> None:
    """End a phase that was entered."""
    clock.phases -= 1
    if not clock.phases:
        _write_wait(0)


def _write_wait(since_ns: int) -> None:
    """Write for the watcher since when the main thread may wait in a phase, unless it is in a call that waits."""
    try:
        if not clock.waiting and here.ring is not None:
            here.ring.waits(since_ns)
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("wait", error)
