"""Tracks where this rank is: its main thread writes around every call, its watcher reads when nothing moves."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Position
from ddpdoctor.model.errors import typed_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

START_ALLOWANCE_S = 60.0
"""Our choice: time before the process group exists, for importing torch and reading the machine. Both have their own
time limits. On a cold network file system the import alone takes half a minute."""


@dataclass(slots=True)
class Tracker:
    """Only the main thread writes, never inside a timed region. Writing a field is atomic, so there is no lock."""

    phase: str = "start"
    what: str = ""
    group: tuple[int, ...] = ()
    op: str = ""
    calls: int = 0
    """Calls begun in ``group`` since the bench began. Ranks with the same number are in the same call."""
    inside: bool = False
    moved_s: float = field(default_factory=time.monotonic)
    """time.monotonic() when a call last completed or ``at`` was last called."""
    allowance_s: float = START_ALLOWANCE_S
    """Added to the hang timeout: how long the next call is expected to take."""
    _calls: dict[tuple[int, ...], int] = field(default_factory=dict)

    def at(self, phase: str, what: str = "", *, allowance_s: float = 0.0) -> None:
        """Record the next phase, and how long one call, batch or computation of it may take."""
        self.phase, self.what, self.allowance_s = phase, what, allowance_s
        self.moved_s = time.monotonic()

    def enter(self, op: str, group: tuple[int, ...]) -> None:
        """Record that a collective call, or a batch of one kind, is about to begin in the group of these ranks."""
        self.inside = False
        self.op, self.group = op, group
        self.calls = self._calls[group] = self._calls.get(group, 0) + 1
        self.inside = True

    def leave(self) -> None:
        """Record that the call completed here. Skip this for a call that raised: the watcher needs to know that."""
        self.inside = False
        self.moved_s = time.monotonic()


MAX_FRAMES = 60
"""Our choice: how many innermost frames of a stack are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MainThreadFailure:
    """The exception that ended the main thread."""

    text: str
    """"ValueError: …", the first line."""
    stack: tuple[str, ...]
    """The frames from where it was caught to where it was raised, as in ``Position``."""


def describe_failure(error: BaseException) -> MainThreadFailure:
    """Return an exception as the report shows it."""
    frames = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
    return MainThreadFailure(text=typed_line(error), stack=_lines(frames))


def take_position(
    rank: int, tracker: Tracker, failure: MainThreadFailure | None, states: Mapping[int, str], ends: Mapping[int, str]
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
