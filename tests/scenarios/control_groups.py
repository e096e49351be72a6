"""A control group with little memory, in either version. Needs root and a hierarchy that may be written to."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def small_memory(limit_bytes: int) -> Iterator[Path]:
    """Give the file to which a process writes its number to join the group; skip where none can be made."""
    group = _make(limit_bytes)
    try:
        yield group / "cgroup.procs"
    finally:
        for _ in range(50):  # the kernel takes a moment to forget processes that have ended
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def _make(limit_bytes: int) -> Path:
    for top, name in ((TOP / "memory", "memory.limit_in_bytes"), (TOP, "memory.max")):
        group = top / f"ddpdoctor-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / name).exists():
                (group / name).write_text(str(limit_bytes))
                return group
            group.rmdir()
    pytest.skip("no control group with a limit on memory can be made here")
