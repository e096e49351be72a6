"""Marks, for the watcher and the step clock, that the main thread is inside a call that needs other ranks."""

from __future__ import annotations

import _thread
import time

from ..state import here, sealed, wall
from ..storage import ring_layout
from ..training.step_clock import clock

_get_ident = _thread.get_ident
_now_ns = time.monotonic_ns


def begin_wait() -> int:
    """Begin to wait; return the time, or 0 if not in the main thread or already waiting.

    It raises nothing of ours.
    """
    began = 0
    try:
        if clock.waiting or _get_ident() != here.main_thread:
            return 0
        began = _now_ns()
        clock.waiting = True
        if not clock.phases and here.ring is not None:
            here.ring.waits(began)
    except BaseException as error:
        if began:
            clock.waiting = False
        sealed[wall.gi_running][_clear,]
        if not sealed[wall.gi_running]["wait begins", error]:
            raise
        return 0
    return began


def end_wait(began_ns: int, counts: bool, ended_ns: int = 0) -> None:
    """End a wait. A wait for a single peer does not count, because not all ranks meet."""
    if not began_ns:
        return
    clock.waiting = False
    try:
        if counts:
            clock.waits[clock.phase] += (ended_ns or _now_ns()) - began_ns
        if not clock.phases and here.ring is not None:
            here.ring.waits(0)
    except BaseException as error:
        sealed[wall.gi_running][_clear,]
        if not sealed[wall.gi_running]["wait ends", error]:
            raise


def enter_phase() -> bool:
    """Begin a phase that may need other ranks; return whether ``leave_phase`` must be called."""
    if _get_ident() != here.main_thread:
        return False
    if not clock.phases:
        _write_wait(_now_ns())
    clock.phases += 1
    return True


def leave_phase() -> None:
    """End a phase that was entered."""
    clock.phases -= 1
    if not clock.phases:
        _write_wait(0)


def heal() -> None:
    """Forget waits and phases whose end an exception from outside has cut off. Call it where there are none."""
    clock.waiting, clock.phases, clock.loading = False, 0, False
    if clock.phase == ring_layout.BACKWARD:
        clock.enter(ring_layout.BEFORE)
    _write_wait(0)


def _write_wait(since_ns: int) -> None:
    """Write for the watcher since when the main thread may wait in a phase, unless it is in a call that waits."""
    try:
        if not clock.waiting and here.ring is not None:
            here.ring.waits(since_ns)
    except BaseException as error:
        sealed[wall.gi_running][_clear,]
        if not sealed[wall.gi_running]["wait", error]:
            raise


def _clear() -> None:
    """Write that the main thread does not wait, unless it does."""
    if not clock.waiting and not clock.phases and here.ring is not None:
        here.ring.waits(0)
