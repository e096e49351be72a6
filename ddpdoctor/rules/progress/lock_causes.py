"""A rank that waits for a lock: of a file, which another process holds, or of its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .clues import Clue, owner_words
from .places import innermost_user, is_file, last_main_stack, other_threads
from .words import line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.causes import FileLock, ProcessCauses
    from ddpdoctor.model.facts import Rank, Stack

    from .scene import Scene

_BATON = "/torch/utils/file_baton.py"
_POLLS = ("/filelock/", "/portalocker/", "/fasteners/", _BATON)
MOST_HOLDERS = 3


def lock_clues(scene: Scene, rank: Rank, causes: ProcessCauses) -> Iterator[Clue]:
    """Return the lock that a rank waits for, and who holds it."""
    stack = last_main_stack(rank)
    if causes.waits_for_lock is not None:
        lock = causes.waits_for_lock
        yield _held(lock.path, _holder_words(scene, rank, lock))
    elif stack is not None and any(is_file(frame, *_POLLS) for frame in stack.frames[-6:]):
        yield _polled(scene, rank, causes, stack)
    else:
        yield from _of_own_process(rank, causes, stack)


def _held(path: str | None, holder: str) -> Clue:
    what = f"the lock on {path}" if path else "a lock on a file"
    return Clue(
        said=f"waits for {what}, which {holder} holds",
        fix=f"let {holder.partition(' (')[0]} give the lock back before it waits for other ranks, or take "
        "it with a time limit",
    )


def _polled(scene: Scene, rank: Rank, causes: ProcessCauses, stack: Stack) -> Clue:
    """Judge a loop that asks for a lock again and again: the path is known, the holder where it has a kernel's lock."""
    path = causes.lock_path
    if any(is_file(frame, _BATON) for frame in stack.frames):
        return _baton(path)
    holders = [lock for lock in causes.locks_of_others if path is None or lock.path == path]
    if path is not None and holders:
        return _held(path, _holder_words(scene, rank, holders[0]))
    if holders:
        listed = ", ".join(f"{lock.path} by {_holder_words(scene, rank, lock)}" for lock in holders[:MOST_HOLDERS])
        return Clue(said=f"polls for a lock file; locks that are held: {listed}")
    return Clue(
        said=f"polls for the lock file {path or 'of a library'}; no process of this job holds a lock on it",
        fix=f"see who has {path or 'the lock file'} locked (another job or host), or take it with a time limit",
    )


def _baton(path: str | None) -> Clue:
    file = path or "the file `lock` in the build folder"
    return Clue(
        said=f"waits until {file} is gone, which marks a build of a C++ extension by another process",
        fix=f"if no process builds that extension, one died while it did: delete {file}; build it on one rank before "
        "the others load it",
    )


def _holder_words(scene: Scene, rank: Rank, lock: FileLock) -> str:
    return owner_words(scene, rank.host, lock.holder_pid, lock.holder)


def _of_own_process(rank: Rank, causes: ProcessCauses, stack: Stack | None) -> Iterator[Clue]:
    """Name the other threads where the main one sleeps on a futex in the user's line or in threading.

    Which of them holds the lock, or whether it is one of another process, the kernel does not know.
    """
    if causes.blocked is None or causes.blocked.call != "futex" or stack is None or not stack.frames:
        return
    last = stack.frames[-1]
    if not (last.user or is_file(last, "/threading.py", "/queue.py", "/concurrent/futures/")):
        return
    threads = [(s.thread, innermost_user(s.frames)) for s in other_threads(rank, skip_idle=False)]
    told = [f"{name} at {line_of(frame)}" for name, frame in threads if frame is not None][:MOST_HOLDERS]
    if told:
        yield Clue(said=f"sleeps until another thread wakes it (futex); its other threads: {', '.join(told)}")
