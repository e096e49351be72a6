"""A rank that waits for a lock: a file lock that another process holds, or a lock in its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import LockKind
from ddpdoctor.model.words import format_age

from ddpdoctor.rules.progress.clues import Clue, ProcessRole, children_of, find_owner
from ddpdoctor.rules.progress.places import innermost_user, is_file, main_frames, other_threads
from ddpdoctor.rules.progress.words import line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.facts import FileLock, LockFile, ProcessCauses, Rank
    from ddpdoctor.model.stacks import Frame

    from ddpdoctor.rules.progress.job_state import JobState

_BATON = "/torch/utils/file_baton.py"
_POLLS = ("/filelock/", "/portalocker/", "/fasteners/", _BATON)
MOST_HOLDERS = 3
_FREES_GROUP = Clue(
    said="it has finished and is freeing its process group; it holds the GIL, and a thread of the group waits for the "
    "GIL (a deadlock in torch)",
    fix="delete the DDP model before the group (`del model`, then `dist.destroy_process_group()`): the model joins "
    "the group's threads without releasing the GIL, and a thread that frees a tensor needs the GIL",
)


def lock_clues(job: JobState, rank: Rank, causes: ProcessCauses) -> Iterator[Clue]:
    """Return the lock that a rank waits for, and who holds it."""
    frames = main_frames(rank)
    if _frees_group(rank, causes):
        yield _FREES_GROUP
    elif causes.waits_for_lock is not None:
        lock = causes.waits_for_lock
        yield _held(lock.path, _holder(job, rank, lock))
    elif causes.lock_file is not None and causes.lock_file.kind is not LockKind.KERNEL:
        if causes.lock_file.exists:
            yield _marker(job, rank, causes.lock_file)
    elif any(is_file(frame, *_POLLS) for frame in frames[-6:]):
        yield _polled(job, rank, causes, frames)
    else:
        yield from _of_own_process(rank, causes, frames)


def is_left_behind(causes: ProcessCauses | None) -> bool:
    """Return whether a rank polls for an existing lock file whose owner is gone, as far as that can be known."""
    file = causes.lock_file if causes is not None else None
    if file is None or file.kind is LockKind.KERNEL or not file.exists or file.holders or file.named_lives:
        return False
    return not (file.shared or file.unseen or file.named_host) or file.named_lives is False


def left_behind_words(causes: ProcessCauses | None) -> str:
    """Return which lock file was left behind, for a summary, or "" if none was."""
    if causes is None or causes.lock_file is None or not is_left_behind(causes):
        return ""
    return f": it waits for lock file {causes.lock_file.path}, and the owner of that file is gone"


def is_surely_left(causes: ProcessCauses | None) -> bool:
    """Return whether surely nobody will remove that file: its maker would hold it open or be named in it."""
    file = causes.lock_file if causes is not None else None
    known = file is not None and (file.kind is LockKind.MARKER or file.named_lives is False)
    return known and file is not None and not file.shared and is_left_behind(causes)


def is_held_outside(job: JobState, rank: Rank) -> bool:
    """Return whether a rank waits for a lock that a living process outside the job holds."""
    causes = rank.causes
    if causes is None:
        return False
    owners = [owner.pid for owner in causes.lock_file.holders] if causes.lock_file is not None else []
    if causes.waits_for_lock is not None and causes.waits_for_lock.holder_pid is not None:
        owners.append(causes.waits_for_lock.holder_pid)
    here = [other for other in map(job.rank, job.states) if other.host == rank.host]
    own = {other.pid for other in here}.union(*map(children_of, here))
    return bool(owners) and own.isdisjoint(owners)


def _marker(job: JobState, rank: Rank, file: LockFile) -> Clue:
    """Judge a wait for a file to go away: who made it, if known, and whether anybody is there to remove it."""
    waits = f"waits for lock file {file.path} to be removed"
    owner = file.holders[0] if file.holders else None
    if owner is not None:
        who = find_owner(job, rank.host, owner.pid, owner.command)
        return Clue(
            said=f"{waits}; {who.words} has it open",
            fix=f"check what {who.name} is doing; if it hangs, kill it and `rm {file.path}`",
        )
    age = f"; it is {format_age(file.age_s)} old" if file.age_s is not None else ""
    if file.named_lives:
        return Clue(
            said=f"{waits}; the file names process {file.named_pid}{age}",
            fix=f"check what process {file.named_pid} is doing; if it does not use the lock, `rm {file.path}`",
        )
    named = f", and process {file.named_pid}, which it names, is gone" if file.named_lives is False else ""
    if is_left_behind(rank.causes):
        return Clue(
            said=f"{waits}; no visible process has it open{named}{age}: its owner exited without removing it",
            fix=f"`rm {file.path}`; let one rank build first, and the others load the result",
        )
    why = (
        f"it names a process on {file.named_host}"
        if file.named_host
        else "it is on a network file system, so a process on another host may own it"
        if file.shared
        else f"{file.unseen} processes of its owner could not be inspected"
    )
    return Clue(
        said=f"{waits}; no process on this host has it open{named}{age}; "
        f"it is unknown whether its owner is alive: {why}",
        fix=f"if no process uses it anymore: `rm {file.path}`",
    )


def _held(path: str | None, holder: ProcessRole) -> Clue:
    what = f"the lock on {path}" if path else "a lock on a file"
    return Clue(
        said=f"waits for {what}; {holder.words} holds it",
        fix=f"release the lock in {holder.name} before it waits for other ranks, or acquire it with a timeout",
    )


def _polled(job: JobState, rank: Rank, causes: ProcessCauses, frames: tuple[Frame, ...]) -> Clue:
    """Judge a loop that polls for a lock: the path is known; the holder is known if it is a kernel lock."""
    path = causes.lock_path
    if any(is_file(frame, _BATON) for frame in frames):
        return _baton(path)
    if causes.lock_file is not None and causes.lock_file.holders:
        holder = causes.lock_file.holders[0]
        return _held(path, find_owner(job, rank.host, holder.pid, holder.command))
    holders = [lock for lock in causes.locks_of_others if path is None or lock.path == path]
    if path is not None and holders:
        return _held(path, _holder(job, rank, holders[0]))
    if holders:
        listed = ", ".join(f"{lock.path} by {_holder(job, rank, lock).words}" for lock in holders[:MOST_HOLDERS])
        return Clue(said=f"polls for a lock file; held locks: {listed}")
    return Clue(
        said=f"polls for the lock file {path or 'of a library'}; no process of this job holds a lock on it",
        fix=f"find out who locks {path or 'the lock file'} (another job or host), or acquire it with a timeout",
    )


def _baton(path: str | None) -> Clue:
    file = path or "the file `lock` in the build folder"
    return Clue(
        said=f"waits for {file} to be removed: it marks a build of a C++ extension by another process",
        fix=f"if no process is building that extension, its build died: delete {file}; build it on one rank before "
        "the others load it",
    )


def _holder(job: JobState, rank: Rank, lock: FileLock) -> ProcessRole:
    return find_owner(job, rank.host, lock.holder_pid, lock.holder)


def _of_own_process(rank: Rank, causes: ProcessCauses, frames: tuple[Frame, ...]) -> Iterator[Clue]:
    """Name the other threads if the main one sleeps on a futex in the user's line or in threading.

    The kernel does not know which thread holds the lock, or whether another process holds it.
    """
    if causes.blocked is None or causes.blocked.call != "futex" or not frames:
        return
    last = frames[-1]
    if not (last.user or is_file(last, "/threading.py", "/queue.py", "/concurrent/futures/")):
        return
    threads = [(s.thread, innermost_user(s.frames)) for s in other_threads(rank, skip_idle=False)]
    named = [f"{name} ({line_of(frame)})" for name, frame in threads if frame is not None][:MOST_HOLDERS]
    if named:
        yield Clue(said=f"sleeps until another thread wakes it (futex); its other threads: {', '.join(named)}")


def _frees_group(rank: Rank, causes: ProcessCauses) -> bool:
    """Return whether a rank that has destroyed its process group waits inside C and holds the GIL.

    ``destroy_process_group`` drops torch's reference. The reducer of a DDP model holds the last one, and its destructor
    joins the group's threads without releasing the GIL. Seen with Gloo on torch 2.13.
    """
    last = pack_calls(rank.recent_calls)[-1:]
    destroyed = not rank.open_calls and any(call.op == "destroy_process_group" for call in last)
    waits = causes.blocked is not None and causes.blocked.call == "futex"
    return destroyed and waits and rank.recorded and not rank.answered
