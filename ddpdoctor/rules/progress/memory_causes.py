"""A rank that ran out of memory (host, cgroup, GPU or /dev/shm), with what was measured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.nccl_warnings import SHM_FIX
from ddpdoctor.model.words import format_memory

from ddpdoctor.rules.progress.clues import Clue
from ddpdoctor.rules.progress.nodes import causes_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.facts import AtError, DeviceMemory, Rank, Space

    from ddpdoctor.rules.progress.failures import Failure
    from ddpdoctor.rules.progress.job_state import JobState

NEARLY_FULL = 0.9
"""Our choice: above this share of a limit, the memory in use blocked the next allocation."""
FRAGMENTED = 0.15
"""Our choice: if more than this share of torch's reserved memory is unused, its free pieces are too small."""
_OF_DEVICE = re.compile(r"(?:CUDA|HIP|XPU) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_OF_HOST = re.compile(r"DefaultCPUAllocator|allocate memory|std::bad_alloc|Unable to allocate")
_ASKED = re.compile(r"you tried to allocate (\d+) bytes")
_OF_SHARED = re.compile(r"shared memory|</?torch_|\bshm\b|/dev/shm|bus error", re.IGNORECASE)
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (?P<how>.*)")
LESS = "use less memory per rank: smaller batches, fewer loader workers or less prefetching"


def memory_clues(job: JobState, failure: Failure) -> tuple[Clue, ...]:
    """Return what was measured, if a rank ran out of memory or may have."""
    rank = failure.rank
    if failure.error is None:
        return tuple(_of_signal(job, rank))
    text = f"{failure.error.type}: {failure.error.message}"
    at_error = rank.causes.at_error if rank.causes is not None else None
    if failure.error.type == "OutOfMemoryError" or _OF_DEVICE.search(text):
        return tuple(_of_device(at_error))
    if _WORKER.search(text):
        return tuple(_of_worker(job, rank, text))
    if _OF_SHARED.search(text):
        return tuple(_of_shared(_shared(job, rank, at_error), refused="No space left" in text))
    if failure.error.type == "MemoryError" or _OF_HOST.search(text):
        return tuple(_of_host(job, rank, text))
    return ()


def _of_signal(job: JobState, rank: Rank) -> Iterator[Clue]:
    if rank.signal == "SIGBUS":
        yield from _of_shared(_shared(job, rank, None))
    if rank.signal != "SIGKILL" or rank.oom_killed is False:
        return
    space, _ = _limit(job, rank)
    if rank.oom_killed or (space is not None and space.used_bytes >= NEARLY_FULL * space.limit_bytes):
        yield from _use(job, rank)


def _use(job: JobState, rank: Rank) -> Iterator[Clue]:
    """Say how much memory a rank and its children used, and the limit."""
    if rank.causes is None or rank.causes.memory is None:
        return
    space, whose = _limit(job, rank)
    said = f"used {format_memory(rank.causes.memory.most_bytes)} when last measured"
    if space is not None:
        said += f", of the {format_memory(space.limit_bytes)} that {whose}"
    below = rank.causes.children_memory
    if below is not None and rank.causes.children_count:
        said += f"; its {rank.causes.children_count} child processes used {format_memory(below.most_bytes)}"
    yield Clue(said=said, fix=f"{LESS}, or raise the memory limit")


def _limit(job: JobState, rank: Rank) -> tuple[Space | None, str]:
    """Return the memory limit that applies: the cgroup's if it has one, else the whole machine's."""
    host = causes_at(job.facts, rank.host)
    if host is None:
        return None, ""
    if host.group is not None and (host.machine is None or host.group.limit_bytes < host.machine.limit_bytes):
        return host.group, "its cgroup allows"
    return host.machine, "the machine has"


def _of_device(at_error: AtError | None) -> Iterator[Clue]:
    devices = at_error.devices if at_error is not None else ()
    for one in devices:
        yield Clue(said=_device_words(one))
    loose = any(one.reserved_bytes - one.allocated_bytes > FRAGMENTED * one.reserved_bytes for one in devices)
    more = "; much reserved memory is unused: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if loose else ""
    if devices:
        yield Clue(
            said="the GPU ran out of memory",
            fix=f"use less GPU memory: smaller batches, activation checkpointing or sharding{more}",
        )


def _device_words(one: DeviceMemory) -> str:
    return (
        f"on GPU {one.device}, tensors used {format_memory(one.allocated_bytes)} (peak "
        f"{format_memory(one.most_allocated_bytes)}), and torch had reserved {format_memory(one.reserved_bytes)} (peak "
        f"{format_memory(one.most_reserved_bytes)})"
    )


def _of_host(job: JobState, rank: Rank, text: str) -> Iterator[Clue]:
    at_error = rank.causes.at_error if rank.causes is not None else None
    if at_error is not None and at_error.address_space is not None:
        space = at_error.address_space
        yield Clue(
            said=f"its address space was {format_memory(space.used_bytes)} of the {format_memory(space.limit_bytes)} "
            f"that RLIMIT_AS (ulimit -v) allows{_asked(text)}",
            fix=f"{LESS}, or raise the limit: ulimit -v unlimited",
        )
    if at_error is not None and at_error.memory is not None:
        memory = at_error.memory
        used, most = map(format_memory, (memory.used_bytes, memory.most_bytes))
        had = f"had {used} resident when it failed (peak {most})"
        space_all, whose = _limit(job, rank)
        of = f", of the {format_memory(space_all.limit_bytes)} that {whose}" if space_all is not None else ""
        yield Clue(said=had + of, fix=LESS)
    else:
        yield from _use(job, rank)


def _asked(text: str) -> str:
    """Return how much was asked for, if torch says it."""
    match = _ASKED.search(text)
    return f", and it asked for {format_memory(int(match[1]))} more" if match else ""


def _of_worker(job: JobState, rank: Rank, text: str) -> Iterator[Clue]:
    """Judge a loader's worker that a signal ended: /dev/shm was full, or it ran out of memory."""
    match = _WORKER.search(text)
    how = match["how"] if match is not None else ""
    at_error = rank.causes.at_error if rank.causes is not None else None
    if "Bus error" in how or _is_full(_shared(job, rank, at_error)):
        yield from _of_shared(_shared(job, rank, at_error))
    elif "Killed" in how:
        yield from _use(job, rank)


def _shared(job: JobState, rank: Rank, at_error: AtError | None) -> Space | None:
    """Return /dev/shm when it was fullest: at the time of an error, a worker's files may already be gone."""
    host = causes_at(job.facts, rank.host)
    seen = [
        at_error.shared_memory if at_error is not None else None,
        host.shared_memory if host is not None else None,
    ]
    return max((one for one in seen if one is not None), key=lambda one: one.used_bytes, default=None)


def _is_full(space: Space | None) -> bool:
    return space is not None and space.used_bytes >= NEARLY_FULL * space.limit_bytes


def _of_shared(space: Space | None, *, refused: bool = False) -> Iterator[Clue]:
    """Judge /dev/shm. ``refused``: the kernel said that there was no space for the request."""
    if space is None:
        return
    size, used = format_memory(space.limit_bytes), format_memory(space.used_bytes)
    if refused or _is_full(space):
        state = "it was full" if _is_full(space) else "there was no space for the request"
        yield Clue(
            said=f"/dev/shm had {used} of {size} in use: {state}",  # noqa: S108 - a name in a sentence
            fix=f"{SHM_FIX}, or use fewer loader workers",
        )
    else:
        yield Clue(
            said=f"/dev/shm used at most {used} of {size} when measured; "  # noqa: S108 - likewise
            "it may have been full between measurements"
        )
