"""Records where this rank is, for a report."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    from ddpdoctor.probes.bandwidth.tracker import Tracker

MAX_FRAMES = 60
"""Our choice: how many innermost frames of a stack are kept."""
MAX_TEXT = 500
"""Our choice: how many characters of an exception's first line are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The exception that ended the main thread."""

    text: str
    """"ValueError: …", the first line."""
    stack: tuple[str, ...]
    """The frames from where it was caught to where it was raised, as in ``Position``."""


def describe_failure(error: BaseException) -> Failure:
    """Return an exception as the report shows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    text = f"{name}: {lines[0]}" if lines else name
    frames = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
    return Failure(text=text[:MAX_TEXT], stack=_lines(frames))


def take_position(
    rank: int, tracker: Tracker, failure: Failure | None, states: Mapping[int, str], ends: Mapping[int, str]
) -> Position:
    """Return where the main thread is now, or where it failed, and the states of the other processes on this host."""
    return Position(
        rank=rank,
        phase=tracker.phase,
        what=tracker.what,
        group=tracker.group,
        calls=tracker.calls,
        op=tracker.op,
        inside=tracker.inside,
        stale_s=max(0.0, time.monotonic() - tracker.moved_s),
        stack=_main_stack() if failure is None else failure.stack,
        error=None if failure is None else failure.text,
        states={str(other): state for other, state in states.items()},
        ends={str(other): end for other, end in ends.items()},
    )


def _main_stack() -> tuple[str, ...]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the documented way
    innermost_first = islice(traceback.walk_stack(frame), MAX_FRAMES) if frame is not None else ()
    return _lines(reversed(list(innermost_first)))


def _lines(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, ...]:
    return tuple(f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in frames)
