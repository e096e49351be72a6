"""Counts the time of Python's garbage collector in the main thread, and notes the user's line at which it takes most.

The sampling thread cannot see that line: a collection keeps the GIL until it is over.
"""

from __future__ import annotations

import _thread
import gc
import sys
import time

from .. import frames
from ..state import guarded, here
from ..training.step_clock import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Tuple

LONG_NS = 1_000_000
"""Lines of shorter collections are not counted. Our choice: those of young objects take far less."""
MAX_LINES = 64
FIRST_NOTE = 8
"""The step after which the line is noted first. It is noted again after four times as many, and at the end."""

_now_ns = time.monotonic_ns
_collecting_since = 0
_lines: Dict[Tuple[str, int, str], int] = {}
"""By the user's line (file, number, function): the nanoseconds of its long collections."""
_due = FIRST_NOTE


def watch_collections() -> None:
    """Count the time that Python's garbage collector takes in the main thread as a part of the step."""
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)


def _collected(phase: str, info: Dict[str, int]) -> None:
    """Python calls this at the start and at the end of each collection. It must be quick, and must not raise."""
    global _collecting_since
    if _thread.get_ident() != here.main_thread:
        return
    if phase == "start":
        _collecting_since = _now_ns()
    elif _collecting_since:
        took_ns = _now_ns() - _collecting_since
        _collecting_since = 0
        clock.inside.gc += took_ns
        if took_ns >= LONG_NS and clock.number:
            _count(sys._getframe().f_back, took_ns)  # None in the last collection, after all code has ended


@guarded("collections")
def _count(frame: Any, took_ns: int) -> None:
    """Count a collection for the innermost of the user's lines that ran into it."""
    while frame is not None and not frames.is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return
    line = (frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
    if line in _lines or len(_lines) < MAX_LINES:
        _lines[line] = _lines.get(line, 0) + took_ns


def step_ended(number: int) -> None:
    """Note the line now and then, so that it is known also if the process is killed."""
    global _due
    if number >= _due:
        _due *= 4
        note_line()


@guarded("collections")
def note_line() -> None:
    """Write the line whose collections took most."""
    if not _lines or here.ring is None:
        return
    line = max(_lines, key=lambda one: _lines[one])
    here.ring.note({"k": "collected", "frame": frames.describe(*line), "at": time.monotonic_ns()})
