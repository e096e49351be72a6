"""Asks the kernel how a process that is not our child ended."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from ddpdoctor.collect.process.proc import read_process

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO in linux/pidfd.h with the 64-byte struct of its first version, since Linux 6.13."""
_WANTS_EXIT = 1 << 3
"""PIDFD_INFO_EXIT, since Linux 6.15; the kernel answers once the parent has waited for the process."""
_INFO = struct.Struct("<Q52xi")
"""The struct's mask at its start, and exit_code at its end."""


def read_exit_code(pid: int, start_ticks: int, pidfd: int | None) -> int | None:
    """Return the exit status, or the signal's number below zero, or None if the kernel does not say.

    /proc has it while the process is a zombie. Afterwards only a pidfd has it, opened while the process lived.
    """
    status = _of_zombie(pid, start_ticks)
    if status is None and pidfd is not None:
        status = _of_pidfd(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _of_zombie(pid: int, start_ticks: int) -> int | None:
    process = read_process(pid)
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    if process is None or process.start_ticks != start_ticks or os.geteuid() not in (0, owner):
        return None  # the kernel shows 0 for processes of other users
    return process.exit_status


def _of_pidfd(pidfd: int) -> int | None:
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _WANTS_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    answered, status = _INFO.unpack(info)
    return int(status) if answered & _WANTS_EXIT else None
