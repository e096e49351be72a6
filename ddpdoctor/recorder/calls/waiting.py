"""Tells the watcher, and the step's clock, that the main thread is inside a call that needs other ranks."""

from __future__ import annotations

import _thread
import time

from ..state import here
from ..training.step_clock import clock

_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns


def begin_wait(began_ns: int = 0) -> int:
    """Begin to wait, at a time or now; return since when: 0 in another thread, or where the main thread waits already.

    It does not raise.
    """
    try:
        if clock.waiting or _get_ident() != here.main_thread:
            return 0
        began = began_ns or _now_ns()
        if not clock.phases and here.ring is not None:
            here.ring.waits(began)
        clock.waiting = True
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("wait begins", error)
        return 0
    return began


def end_wait(began_ns: int, counts: bool, ended_ns: int = 0) -> None:
    """End a wait that began. One for a single peer does not count: it is no meeting of all. It does not raise."""
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
    """Begin a phase that needs other ranks somewhere; return whether it is to be left. It does not raise."""
    try:
        if _get_ident() != here.main_thread:
            return False
        clock.phases += 1
        if clock.phases == 1 and not clock.waiting and here.ring is not None:
            here.ring.waits(_now_ns())
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("wait begins", error)
    return True


def leave_phase() -> None:
    """End a phase that was entered. It does not raise."""
    clock.phases -= 1
    try:
        if not clock.phases and not clock.waiting and here.ring is not None:
            here.ring.waits(0)
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("wait ends", error)
