"""Asks the kernel how a process ended that is not our child."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of linux/pidfd.h with the 64 bytes of its first version, from Linux 6.13."""
_WANTS_EXIT = 1 << 3
"""PIDFD_INFO_EXIT, from Linux 6.15: answered once the parent has waited for the process."""
_INFO = struct.Struct("<Q52xi")
"""mask, and exit_code at the end of the first version."""
_EXIT_CODE_FIELD = 49
"""Of /proc/PID/stat, counted from the state: field 52 of proc(5)."""


def read_exit_code(pid: int, start_ticks: int, pidfd: int | None) -> int | None:
    """Return an exit status, or a signal's number below zero; None where the kernel does not say.

    A zombie says it in /proc; after that only a pidfd does, that was opened while the process lived.
    """
    status = _of_zombie(pid, start_ticks)
    if status is None and pidfd is not None:
        status = _of_pidfd(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _of_zombie(pid: int, start_ticks: int) -> int | None:
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        owner = folder.stat().st_uid
    except OSError:
        return None
    if os.geteuid() not in (0, owner):  # the kernel shows 0 in place of a stranger's status
        return None
    if len(fields) <= _EXIT_CODE_FIELD or fields[0] not in "ZX" or int(fields[19]) != start_ticks:
        return None
    return int(fields[_EXIT_CODE_FIELD])


def _of_pidfd(pidfd: int) -> int | None:
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _WANTS_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    answered, status = _INFO.unpack(info)
    return int(status) if answered & _WANTS_EXIT else None
