"""Finds processes that hang inside the NVIDIA driver, where no signal reaches them."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.gpu.kernel_log import read_lines
from ddpdoctor.collect.gpu.nvml import NO_DRIVER, is_nvidia_here
from ddpdoctor.model.gpus import StuckProcess
from ddpdoctor.model.reading import NotRead

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

BETWEEN_LOOKS_S = 1.0
KTHREADD = "2"
"""The parent of the kernel's own threads: the driver's may sleep as they like."""
DRIVER_WORDS = re.compile(r"nvidia|\bnv_|_nv\d{6}rm|\buvm_|rm_ioctl|os_acquire_")
"""Symbols of the NVIDIA modules: nvidia_ioctl, nv_open_device, _nv012345rm, uvm_ioctl, os_acquire_mutex."""
TOOLS = re.compile(r"nvidia-|nv-fabricmanage|nv-hostengine|dcgmi")
"""Programs that do nothing but ask the driver: in a sleep that cannot be ended they hang there, whatever the symbol."""
HUNG_TASK = re.compile(r"INFO: task .+:(?P<pid>\d+) blocked for more than (?P<seconds>\d+) seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A process in uninterruptible sleep, and what changes should it run for a moment."""

    pid: int
    name: str
    wchan: str
    marks: tuple[str, ...]
    """When it started, the time that it ran, how often it was switched."""


def read_stuck(system: System, plan: ReadingPlan) -> tuple[StuckProcess, ...]:  # noqa: ARG001 - every collector is called so
    """Return the processes that hang in the driver; raises ``NotRead`` where there is none."""
    if not is_nvidia_here(system):
        raise NotRead(NO_DRIVER)
    return find_stuck(system, time.sleep)


def find_stuck(system: System, wait: Callable[[float], None]) -> tuple[StuckProcess, ...]:
    """Look, and look again only where there is somebody: who sleeps for a moment has been switched meanwhile."""
    first = _look(system)
    if not first:
        return ()
    wait(BETWEEN_LOOKS_S)
    second = _look(system)
    blocked = _blocked_s(system)
    return tuple(
        StuckProcess(
            pid=look.pid, name=look.name, wchan=look.wchan, seconds=max(BETWEEN_LOOKS_S, blocked.get(look.pid, 0.0))
        )
        for look in first
        if look in second
    )


def _look(system: System) -> list[_Look]:
    own = str(os.getpid()) if system.live else ""
    found = (_sleeper(system, pid, own) for pid in system.names("/proc") if pid.isdecimal())
    return [look for look in found if look is not None]


def _sleeper(system: System, pid: str, own: str) -> _Look | None:
    """Return a process that sleeps in the driver.

    Children of our own, which ask the driver just now, are left out, and so are threads of the kernel.
    """
    stat = system.text_or(f"/proc/{pid}/stat")
    head, _, tail = stat.rpartition(")")
    fields = tail.split()
    if len(fields) < 20 or fields[0] != "D" or fields[1] in {own, KTHREADD}:
        return None
    name = head.partition("(")[2]
    wchan = system.text_or(f"/proc/{pid}/wchan").removeprefix("0")
    stack = system.text_or(f"/proc/{pid}/stack")
    if not (DRIVER_WORDS.search(wchan) or DRIVER_WORDS.search(stack) or TOOLS.match(name)):
        return None
    switches = re.findall(r"ctxt_switches:\s*(\d+)", system.text_or(f"/proc/{pid}/status"))
    return _Look(pid=int(pid), name=name, wchan=wchan, marks=(fields[19], fields[11], fields[12], *switches))


def _blocked_s(system: System) -> dict[int, float]:
    """Return for how long the kernel's own watchdog says that processes have been blocked, by pid, where it is read."""
    try:
        lines = read_lines(system)
    except NotRead:
        return {}
    found = (HUNG_TASK.search(line.text) for line in lines)
    # The kernel repeats itself as the time grows: the last line counts.
    return {int(one["pid"]): float(one["seconds"]) for one in found if one is not None}
