"""Reads whether the kernel holds the wall clock for synchronised."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ddpdoctor.model.limits import Clock

if TYPE_CHECKING:
    from ddpdoctor.collect.node import Plan
    from ddpdoctor.collect.system import System

_SIZE_BYTES = 512
"""More than any kernel's struct timex."""


def read_clock(system: System, plan: Plan) -> Clock:  # noqa: ARG001 - the form of every collector
    """Return what adjtimex says. How far the clock is off others is measured by who gathers the nodes."""
    try:
        unsynchronised = system.calls.clock_unsynchronised()
    except OSError:
        return Clock(synchronised=None, offset_s=None)
    return Clock(synchronised=not unsynchronised, offset_s=None)


def read_clock_status() -> int:
    """Return the status bits of adjtimex, asked with modes 0, which sets nothing; raises OSError."""
    if sys.platform != "linux":
        raise OSError("adjtimex is a call of Linux")
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    # struct timex begins: unsigned modes; long offset, freq, maxerror, esterror; int status.
    place = 5 * ctypes.sizeof(ctypes.c_long)
    buffer = ctypes.create_string_buffer(_SIZE_BYTES)
    if library.adjtimex(buffer) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int.from_bytes(buffer.raw[place : place + 4], sys.byteorder)
