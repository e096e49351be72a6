"""Says what memory a process had when an exception was about memory: afterwards nobody can ask."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

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
"""Of torch's texts: "CUDA out of memory", "DefaultCPUAllocator: can't allocate memory", "unable to allocate shared
memory(shm) for file", "unable to write to file </torch_...>: No space left on device", "DataLoader worker (pid 7) is
killed by signal: Bus error"."""
SHARED = "/dev/shm"  # noqa: S108 - looked at, not written to
MOST_DEVICES = 16


def at_error(error: BaseException, text: str) -> Optional[Dict[str, Any]]:
    """Return resident memory, limit of addresses, GPUs' allocator and /dev/shm; None where the error is another one.

    It must not fail: the exception is noted with it or without it.
    """
    if not isinstance(error, MemoryError) and not any(word in text for word in WORDS):
        return None
    found = {}
    for name, read in (
        ("resident", _resident),
        ("address_space", _address_space),
        ("shared_memory", _shared),
        ("devices", _devices),
    ):
        try:
            found[name] = read()
        except Exception:  # noqa: BLE001 - memory is short, and torch may be in any state
            found[name] = None
    return found


def _status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(name.encode() + b":"):
                return int(line.split()[1]) * 1024
    return 0


def _resident() -> List[int]:
    return [_status("VmRSS"), _status("VmHWM")]


def _address_space() -> Optional[List[int]]:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else [limit, _status("VmSize")]


def _shared() -> Optional[List[int]]:
    stat = os.statvfs(SHARED)
    total = stat.f_frsize * stat.f_blocks
    return [total, total - stat.f_frsize * stat.f_bavail] if total else None


def _devices() -> List[List[int]]:
    """Ask torch's allocator, which keeps these numbers itself, and never the device: it may not answer."""
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
