"""Which of the user's lines a rank is at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import Child, Rank
    from ddpdoctor.model.stacks import Frame, Look, Stack

MAX_PLACES = 2
"""Most places of one rank in a finding."""

_WAITING_FILES = (
    "/threading.py",
    "/queue.py",
    "/selectors.py",
    "/subprocess.py",
    "/concurrent/futures/_base.py",
    "/multiprocessing/queues.py",
    "/multiprocessing/connection.py",
    "/multiprocessing/popen_fork.py",
    "/multiprocessing/process.py",
    "/multiprocessing/synchronize.py",
    "/multiprocessing/pool.py",
)
_TORCH = "/torch/"


def is_file(frame: Frame, *parts: str) -> bool:
    """Return whether the frame's file has one of these parts in its path."""
    path = frame.file.replace("\\", "/")
    return any(part in path for part in parts)


def main_stack(look: Look) -> Stack | None:
    """Return the main thread's stack."""
    return next((stack for stack in look.stacks if stack.is_main), None)


def last_main_stack(rank: Rank | Child) -> Stack | None:
    """Return the main thread's stack from the last sample that has one with frames."""
    for look in reversed(rank.looks):
        stack = main_stack(look)
        if stack is not None and stack.frames:
            return stack
    return None


def without_stale_looks(rank: Rank) -> Rank:
    """Return a rank without the samples that its main thread's last call came after.

    On crowded cores a rank may not answer in time, so its last answer may belong to an earlier request.
    """
    calls = (*rank.open_calls, *rank.recent_calls[-1:])
    last = max((call.started_ns for call in calls if call.thread_is_main), default=0)
    fresh = tuple(look for look in rank.looks if look.time_ns >= last)
    return rank if len(fresh) == len(rank.looks) else replace(rank, looks=fresh)


def innermost_user(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of the user's own code."""
    found = None
    for frame in frames:
        if frame.user:
            found = frame
    return found


def innermost_own(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost user frame, else the innermost one outside torch."""
    outside = [frame for frame in frames if not is_file(frame, _TORCH)]
    return innermost_user(frames) or (outside[-1] if outside else None)


def waits_in_library(stack: Stack | None) -> bool:
    """Return whether a thread is in a lock, a join, a queue or a pipe of the standard library."""
    return stack is not None and bool(stack.frames) and is_file(stack.frames[-1], *_WAITING_FILES)


def to_place(rank: int, frame: Frame) -> Place:
    """Return a frame as a rank's place."""
    return Place(rank=rank, file=frame.file, line=frame.line, function=frame.function)


def lines_seen(looks: tuple[Look, ...]) -> tuple[Frame, ...]:
    """Return up to two lines of the function that the main thread was last in, the most frequent first."""
    stacks = [stack for stack in map(main_stack, looks) if stack is not None and stack.frames]
    frames = [frame for frame in (innermost_own(stack.frames) for stack in stacks) if frame is not None]
    if not frames:
        return ()
    last = frames[-1]
    same = [frame for frame in reversed(frames) if (frame.file, frame.function) == (last.file, last.function)]
    by_line = {frame.line: frame for frame in same}
    return tuple(by_line[line] for line, _ in Counter(frame.line for frame in same).most_common(MAX_PLACES))


def busy_children(rank: Rank) -> tuple[Frame, ...]:
    """Return the innermost user lines of the rank's children that do not themselves wait for work."""
    found = []
    for child in rank.children:
        if child.idle:
            continue
        stack = last_main_stack(child)
        frame = innermost_user(stack.frames) if stack is not None else None
        if frame is not None:
            found.append(frame)
    return tuple(found)


def other_threads(rank: Rank, *, skip_idle: bool = True) -> tuple[Stack, ...]:
    """Return the threads other than the main one that run the user's code, except those that wait for work."""
    if not rank.looks:
        return ()
    stacks = [s for s in rank.looks[-1].stacks if not s.is_main and innermost_user(s.frames) is not None]
    return tuple(s for s in stacks if not (skip_idle and waits_in_library(s)))


def standing_places(rank: Rank, *, waits_for_child: bool) -> tuple[Place, ...]:
    """Return where a rank is that others wait for: its own line, and the line of the thread or child it waits for."""
    own = lines_seen(rank.looks)
    if not own and rank.last_place is not None:
        own = (rank.last_place,)
    stack = last_main_stack(rank)
    frames: tuple[Frame, ...] = own
    if waits_for_child or waits_in_library(stack):
        frames = (*busy_children(rank)[:1], *own[:1], *own[1:])
    if len(own) <= 1 and _may_wait_for_thread(stack):
        threads = tuple(innermost_user(s.frames) for s in other_threads(rank))
        frames = (*frames, *(frame for frame in threads if frame is not None))
    handled = innermost_user(rank.handled.frames) if rank.handled is not None else None
    return places(rank.rank, (*frames, handled))


def _may_wait_for_thread(stack: Stack | None) -> bool:
    """Return whether the main thread waits: in a library, or in C code called from the user's own line."""
    return stack is not None and bool(stack.frames) and (waits_in_library(stack) or stack.frames[-1].user)


def places(rank: int, frames: Iterable[Frame | None]) -> tuple[Place, ...]:
    """Return at most two different places."""
    found: list[Place] = []
    for frame in frames:
        if frame is None:
            continue
        place = to_place(rank, frame)
        if place not in found:
            found.append(place)
    return tuple(found[:MAX_PLACES])
