"""Which of the user's lines a rank is at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.facts import Child, HelperError, Raised, Rank
    from ddpdoctor.model.stacks import Frame, Stack, StackSample

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
    "/asyncio/",
)
_CONNECTIONS = ("/socket.py", "/ssl.py", "/http/client.py", "/urllib3/", "/requests/", "/httpx/", "/httpcore/")
_TORCH = "/torch/"
_NO_ERRORS = frozenset({"GeneratorExit", "KeyboardInterrupt", "StopAsyncIteration", "StopIteration"})
TRAINED_ON_NS = 300_000_000_000
"""Our choice: a queue that was filled ahead is empty by then."""


def is_file(frame: Frame, *parts: str) -> bool:
    """Return whether the frame's file has one of these parts in its path."""
    path = frame.file.replace("\\", "/")
    return any(part in path for part in parts)


def main_frames(rank: Rank | Child) -> tuple[Frame, ...]:
    """Return the main thread's frames from the last sample that has any, the innermost last."""
    stacks = (stack for sample in reversed(rank.samples) for stack in sample.stacks if stack.is_main)
    return next((stack.frames for stack in stacks if stack.frames), ())


def without_stale_samples(rank: Rank) -> Rank:
    """Return a rank without the samples that its main thread's last call came after.

    On crowded cores a rank may not answer in time, so its last answer may belong to an earlier request.
    """
    calls = (*rank.open_calls, *rank.recent_calls[-1:])
    last = max((call.started_ns for call in calls if call.thread_is_main), default=0)
    fresh = tuple(sample for sample in rank.samples if sample.time_ns >= last)
    return rank if len(fresh) == len(rank.samples) else replace(rank, samples=fresh)


def innermost_user(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's own code."""
    return next((frame for frame in reversed(frames) if frame.user), None)


def innermost_own(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost user frame, else the innermost one outside torch."""
    outside = [frame for frame in frames if not is_file(frame, _TORCH)]
    return innermost_user(frames) or (outside[-1] if outside else None)


def waits_in_library(frames: Sequence[Frame]) -> bool:
    """Return whether a thread is in a lock, a join, a queue or a pipe of the standard library."""
    return bool(frames) and is_file(frames[-1], *_WAITING_FILES)


def to_place(rank: int, frame: Frame) -> Place:
    """Return a frame as a rank's place."""
    return Place(rank=rank, file=frame.file, line=frame.line, function=frame.function)


def lines_seen(samples: tuple[StackSample, ...]) -> tuple[Frame, ...]:
    """Return up to two lines of the function that the main thread was last in, the most frequent first."""
    stacks = [stack for sample in samples for stack in sample.stacks if stack.is_main]
    frames = [frame for stack in stacks if (frame := innermost_own(stack.frames)) is not None]
    if not frames:
        return ()
    last = frames[-1]
    same = [frame for frame in reversed(frames) if (frame.file, frame.function) == (last.file, last.function)]
    by_line = {frame.line: frame for frame in same}
    return tuple(by_line[line] for line, _ in Counter(frame.line for frame in same).most_common(MAX_PLACES))


def busy_children(rank: Rank) -> tuple[Frame, ...]:
    """Return the innermost user lines of the rank's children that do not wait for work, last those in a collective.

    A child whose main thread waits for work, such as a server, may have another thread that works.
    """
    stacks = [main_frames(child) for child in rank.children if not child.idle]
    stacks += [thread.frames for child in rank.children if child.idle for thread in other_threads(child)]
    stacks.sort(key=lambda frames: bool(frames) and is_file(frames[-1], "/torch/distributed/"))
    return tuple(frame for frames in stacks if (frame := innermost_user(frames)) is not None)


def last_helper_errors(rank: Rank) -> tuple[HelperError, ...]:
    """Return the errors of helpers that a rank may wait for, the last first.

    Not those after which it long trained on, and none if it just sleeps.
    """
    frames = main_frames(rank)
    if frames and frames[-1].function == "sleep" and is_file(frames[-1], "/asyncio/"):
        return ()
    since_ns = (rank.last_progress_ns or 0) - TRAINED_ON_NS
    return tuple(one for one in reversed(rank.helper_errors) if one.error.time_ns >= since_ns)


def other_threads(rank: Rank | Child, *, skip_idle: bool = True) -> tuple[Stack, ...]:
    """Return the threads other than the main one that run the user's code, except those that wait for work."""
    if not rank.samples:
        return ()
    stacks = [s for s in rank.samples[-1].stacks if not s.is_main and innermost_user(s.frames) is not None]
    return tuple(s for s in stacks if not (skip_idle and waits_in_library(s.frames)))


def places_held_up(rank: Rank, *, waits_for_child: bool) -> tuple[Place, ...]:
    """Return where a rank is that others wait for: its own line, and the line of the thread or child it waits for.

    The line of an error that it handles, and of a child that it waits for, come before its own. The line of a child
    that it may wait for, at a pipe or a connection, and that of a helper's error come after it.
    """
    own = lines_seen(rank.samples) or ((rank.last_place,) if rank.last_place is not None else ())
    stack = main_frames(rank)
    in_library = waits_in_library(stack)
    blocked = rank.causes.blocked if rank.causes is not None else None
    is_near = bool(stack) and (is_file(stack[-1], *_CONNECTIONS) or (blocked is not None and blocked.file == "pipe"))
    error = own_error(rank)
    found: list[Frame | None] = [innermost_user(error.frames) if error is not None else None]
    child = busy_children(rank)[:1] if waits_for_child or in_library or is_near else ()
    found += [*own[:1], *child] if is_near else [*child, *own[:1]]
    found += [innermost_user(one.error.frames) for one in last_helper_errors(rank)[:1]]
    found += own[1:]
    if len(own) <= 1 and (in_library or (stack and stack[-1].user)):  # in C code, called from the user's own line
        loops = (thread for thread in other_threads(rank, skip_idle=False) if is_file(thread.frames[-1], "/asyncio/"))
        found += [innermost_user(thread.frames) for thread in (*other_threads(rank), *loops)]
    return places(rank.rank, found)


def own_error(rank: Rank) -> Raised | None:
    """Return the first of the script's own errors that the main thread was handling, or None."""
    handled = rank.handled
    found = handled and (handled.first if handled.in_call else handled.first or handled)
    return found if found is not None and found.type not in _NO_ERRORS else None


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
