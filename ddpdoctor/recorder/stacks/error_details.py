"""Details of an exception: the memory that the process had, and the underlying error on this rank."""

from __future__ import annotations

import os
import sys

from .. import frames
from ..state import pass_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Callable, Dict, List, Optional

    Frames = List[Dict[str, Any]]

WORDS = (
    "out of memory",
    "allocate memory",
    "shared memory",
    "shm",
    "No space left on device",
    "is killed by signal",
    "Bus error",
    "bad_alloc",
)
"""From torch's texts: "CUDA out of memory", "DefaultCPUAllocator: can't allocate memory", "unable to allocate shared
memory(shm) for file", "unable to write to file </torch_...>: No space left on device", "DataLoader worker (pid 7) is
killed by signal: Bus error"."""
SHARED = "/dev/shm"  # noqa: S108 - read, not written to
MOST_DEVICES = 16


def at_error(error: BaseException, text: str) -> Optional[Dict[str, Any]]:
    """Return resident memory, address space limit, GPU allocators and /dev/shm, or None if memory is not the problem.

    It must not raise, because the exception is noted in any case.
    """
    if not isinstance(error, MemoryError) and not any(word in text for word in WORDS):
        return None
    found = {}
    for name, read in (
        ("resident", lambda: [_status("VmRSS"), _status("VmHWM")]),
        ("address_space", _address_space),
        ("shared_memory", _shared),
        ("devices", _devices),
    ):
        try:
            found[name] = read()
        except Exception as failure:  # noqa: BLE001 - memory is short, and torch may be in any state
            pass_on(failure)
            found[name] = None
    return found


def _status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(name.encode() + b":"):
                return int(line.split()[1]) * 1024
    return 0


def _address_space() -> Optional[List[int]]:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else [limit, _status("VmSize")]


def _shared() -> Optional[List[int]]:
    stat = os.statvfs(SHARED)
    total = stat.f_frsize * stat.f_blocks
    return [total, total - stat.f_frsize * stat.f_bavail] if total else None


def _devices() -> List[List[int]]:
    """Return the numbers that torch's allocator keeps for each GPU. The device, which may hang, is not asked."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    numbers = [
        [
            i,
            cuda.memory_allocated(i),
            cuda.max_memory_allocated(i),
            cuda.memory_reserved(i),
            cuda.max_memory_reserved(i),
        ]
        for i in range(min(cuda.device_count(), MOST_DEVICES))
    ]
    return [row for row in numbers if row[4]]


MAX_TEXT = 65536
"""Characters of an error's text that are read. Our choice: a child's whole traceback is a tenth of it."""


def text_of(error: BaseException) -> str:
    """Return an error's text without secrets. A failed download, for example, quotes its URL."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - the script's own class may fail here
        pass_on(failure)
        return "(its text could not be had)"
    from ..storage.secrets import hide_in_text  # here, because it loads re

    return hide_in_text(text[:MAX_TEXT])


def frames_of(traceback: Optional[TracebackType]) -> List[Dict[str, Any]]:
    """Return the frames of a traceback, outermost first, without the recorder's own."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not frames.is_own_file(code.co_filename):
            found.append(frames.describe(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return frames.trim(found)


MAX_LINKS = 8
"""Length of the chain of causes that is followed. Our choice."""


class ErrorReason:
    """An error, where it was raised, and which ranks it concerns."""

    __slots__ = ("error", "first", "frames", "passed_on", "ranks")

    def __init__(self, error: BaseException, raised_at: Frames) -> None:
        self.error = error
        self.frames = raised_at
        self.passed_on = ""
        """The type of the outer error that this one caused; empty if there is none."""
        self.ranks: List[int] = []
        """The ranks whose errors the outer error collects; empty if it is no collection."""
        self.first: Optional[BaseException] = None
        """The script's own error that this one followed from: its cause, or what was handled when its call failed."""


def reason_of(
    error: BaseException, rank: int, raised_by_call: Callable[[Any], bool], in_call: bool = False
) -> ErrorReason:  # fmt: skip
    """Return the error on this rank that caused ``error``, or ``error`` itself if there is none.

    ``raised_by_call`` says whether a recorded call has raised an error, ``in_call`` whether one raises this one now.
    """
    outer = type(error).__name__
    found = ErrorReason(error, frames_of(error.__traceback__))
    reported = _reported_by_ranks(error)
    if reported:
        found.ranks = sorted(reported)
        if rank in reported:
            own, summary = reported[rank]
            found.error, found.passed_on = own, outer
            found.frames = frames.trim(
                found.frames + [frames.describe(f.filename, f.lineno or 0, f.name) for f in summary]
            )
    for _ in range(MAX_LINKS):
        if in_call or raised_by_call(found.error):
            break
        context = found.error.__context__
        cause = found.error.__cause__ or (context if context is not None and raised_by_call(context) else None)
        if cause is None:
            break
        raised_at = frames_of(cause.__traceback__)
        if not raised_by_call(cause):
            by_script = bool(found.frames) and found.frames[-1]["u"]
            if by_script or not any(frame["u"] for frame in raised_at):
                break
        found.error, found.frames, found.passed_on = cause, frames.trim(found.frames + raised_at), outer
    found.first = _first_of_script(found.error, raised_by_call, in_call)
    return found


def _first_of_script(
    error: BaseException, raised_by_call: Callable[[Any], bool], in_call: bool
) -> Optional[BaseException]:
    """Return the earliest error of the script's own that an error followed from, or None.

    That is its cause, or the first error of a group. If a call raised it in a ``finally`` or an ``except``, or if it is
    an exit from there, it is what the rank was handling.
    """
    first = None
    step: Optional[BaseException] = error
    for _ in range(MAX_LINKS):
        if step is None:
            break
        follows = in_call or raised_by_call(step) or isinstance(step, SystemExit)
        is_group = any(kind.__name__ == "BaseExceptionGroup" for kind in type(step).__mro__)
        inner = next(iter(step.exceptions), None) if is_group else None  # type: ignore[attr-defined]
        step, in_call = step.__cause__ or inner or (step.__context__ if follows else None), False
        is_error = isinstance(step, Exception) and not isinstance(step, StopIteration) and not raised_by_call(step)
        if step is not None and is_error and any(frame["u"] for frame in frames_of(step.__traceback__)):
            first = step
    return first


def _reported_by_ranks(error: BaseException) -> Dict[int, Any]:
    """Return the ranks' errors that ``torch.distributed.checkpoint`` collected in one, each with its traceback."""
    failures = getattr(error, "failures", None)
    if type(error).__name__ != "CheckpointException" or not isinstance(failures, dict):
        return {}
    pairs = {rank: pair for rank, pair in failures.items() if isinstance(rank, int) and isinstance(pair, tuple)}
    return {rank: pair for rank, pair in pairs.items() if len(pair) == 2 and isinstance(pair[0], BaseException)}
