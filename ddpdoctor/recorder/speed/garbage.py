"""Counts the time of Python's garbage collector in the main thread, and notes the user's line at which it takes most.

The sampling thread cannot see that line: a collection keeps the GIL until it is over.

What Python calls at the start and at the end of a collection is C code alone. In a function of ours a signal handler of
the script could run, and Python would only print what it raises there. So C iterators feed each other. Each is read by
``next``, which happens when ``getattr`` asks ``_marks`` for "start" or "stop".
"""

from __future__ import annotations

import _thread
import gc
import sys
import time
from collections import deque
from functools import partial
from itertools import accumulate, chain, repeat, tee
from operator import attrgetter, getitem, sub

from .. import frames
from ..state import guarded, here
from ..training.step_clock import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque, Dict, Iterator, Tuple

LONG_NS = 1_000_000
"""Lines of shorter collections are not counted. Our choice: those of young objects take far less."""
MAX_LINES = 64
MAX_COLLECTIONS = 4096
"""Collections of one step that are counted, the latest."""
MAX_FRAMES = 1024
"""Frames of its long collections that are kept, the latest."""
FIRST_NOTE = 8
"""The step after which the line is noted first. It is noted again after four times as many, and at the end."""

_began: Deque[int] = deque([0], 1)
"""When the last collection began."""
_took: Deque[Tuple[int, int]] = deque(maxlen=MAX_COLLECTIONS)
"""Thread and nanoseconds of each collection since the last step."""
_places: Deque[Tuple[Any, int]] = deque(maxlen=MAX_FRAMES)
"""Of each long one: the same, then code and line of each frame, innermost first."""
_lines: Dict[Tuple[str, int, str], int] = {}
"""By the user's line (file, number, function): the nanoseconds of its long collections."""
_due = FIRST_NOTE
_callback: Any = None


def watch_collections() -> None:
    """Count the time that Python's garbage collector takes in the main thread as a part of the step."""
    global _callback
    if _callback is None:
        _callback = _made_of_c()
        clock.collected = _count
    if _callback not in gc.callbacks:
        gc.callbacks.append(_callback)


def _made_of_c() -> Any:
    """Return a C function that takes a phase ("start" or "stop") and any second argument."""
    now, last = partial(iter, time.monotonic_ns), partial(map, getitem)
    thread: Iterator[int] = iter(_thread.get_ident, None)
    to_keep, to_judge = tee(map(sub, now(None), last(repeat(_began), repeat(-1))))
    # accumulate makes "f_back", "f_back", ... into a walk outward. It ends with an AttributeError at the None after the
    # outermost frame. To getattr with a default, that is a missing attribute.
    frame: Any = zip(map(dict.get, iter(sys._current_frames, None), iter(_thread.get_ident, None)))
    walks: Any = map(accumulate, map(chain, frame, repeat(("f_back",) * frames.MAX_DEPTH)), repeat(getattr))
    rows: Any = map(map, repeat(attrgetter("f_code", "f_lineno")), walks)
    keep_long = zip(map(_places.append, last(repeat(_took), repeat(-1))), map(_places.extend, rows))
    by_length: Any = (repeat(None), keep_long)
    keep_if_long = map(next, map(by_length.__getitem__, map(LONG_NS.__le__, to_judge)))

    class Marks:
        start = property(partial(next, map(_began.append, now(None))))
        stop = property(partial(next, zip(map(_took.append, zip(thread, to_keep)), keep_if_long)))

    return partial(getattr, Marks())


def _count() -> int:
    """Return how long the collections of the main thread took since the last call, and count the long ones' lines.

    A line is the innermost of the user's lines that ran into the collection.
    """
    total = 0
    while _took:
        thread, took_ns = _took.popleft()
        total += took_ns if thread == here.main_thread else 0
    took_ns = 0
    while _places:
        place, number = _places.popleft()
        if isinstance(place, int):
            took_ns = number if place == here.main_thread and clock.number > 1 else 0
        elif took_ns and frames.is_user_file(place.co_filename):
            line = (place.co_filename, number or 0, place.co_name)
            if line in _lines or len(_lines) < MAX_LINES:
                _lines[line] = _lines.get(line, 0) + took_ns
            took_ns = 0
    return total


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
