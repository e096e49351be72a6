"""Finds processes that hang inside the NVIDIA driver, which no signal can end."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.gpu.kernel_log import read_lines
from ddpdoctor.collect.gpu.nvml import NO_DRIVER, is_nvidia_here
from ddpdoctor.collect.proc import Process, read_process
from ddpdoctor.model.gpus import StuckProcess
from ddpdoctor.model.reading import NotRead

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

BETWEEN_READS_S = 1.0
KTHREADD = 2
"""The parent of kernel threads. The driver's own kernel threads may sleep for long."""
DRIVER_WORDS = re.compile(r"nvidia|\bnv_|_nv\d{6}rm|\buvm_|rm_ioctl|os_acquire_")
"""Symbols of the NVIDIA modules: nvidia_ioctl, nv_open_device, _nv012345rm, uvm_ioctl, os_acquire_mutex."""
TOOLS = re.compile(r"nvidia-|nv-fabricmanage|nv-hostengine|dcgmi")
"""Programs that only query the driver: in uninterruptible sleep, they hang in the driver, whatever the symbol."""
HUNG_TASK = re.compile(r"INFO: task .+:(?P<pid>\d+) blocked for more than (?P<seconds>\d+) seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sleeper:
    """A process in uninterruptible sleep, with counters that change if it runs at all."""

    process: Process
    wchan: str
    switches: tuple[str, ...]
    """Its context switches."""


def read_stuck(system: System, plan: ReadingPlan) -> tuple[StuckProcess, ...]:  # noqa: ARG001 - all collectors get both
    """Return the processes that hang in the driver; raises ``NotRead`` if there is no driver."""
    if not is_nvidia_here(system):
        raise NotRead(NO_DRIVER)
    return find_stuck(system, time.sleep)


def find_stuck(system: System, wait: Callable[[float], None]) -> tuple[StuckProcess, ...]:
    """Check twice, the second time only if the first found a process; one that slept briefly has run in between."""
    first = _sleepers(system)
    if not first:
        return ()
    wait(BETWEEN_READS_S)
    second = _sleepers(system)
    blocked = _blocked_s(system)
    return tuple(
        StuckProcess(
            pid=pid, name=one.process.name, wchan=one.wchan, seconds=max(BETWEEN_READS_S, blocked.get(pid, 0.0))
        )
        for one in first
        if one in second and (pid := one.process.pid)
    )


def _sleepers(system: System) -> list[_Sleeper]:
    own = os.getpid() if system.live else 0
    found = (_sleeper(system, pid, own) for pid in system.names("/proc") if pid.isdecimal())
    return [one for one in found if one is not None]


def _sleeper(system: System, pid: str, own: int) -> _Sleeper | None:
    """Return a process that sleeps in the driver, but not our own children (which query it) or kernel threads."""
    process = read_process(int(pid), system.path("/proc"))
    if process is None or process.state != "D" or process.ppid in {own, KTHREADD}:
        return None
    wchan = system.text_or(f"/proc/{pid}/wchan").removeprefix("0")
    stack = system.text_or(f"/proc/{pid}/stack")
    if not (DRIVER_WORDS.search(wchan) or DRIVER_WORDS.search(stack) or TOOLS.match(process.name)):
        return None
    switches = re.findall(r"ctxt_switches:\s*(\d+)", system.text_or(f"/proc/{pid}/status"))
    return _Sleeper(process=process, wchan=wchan, switches=tuple(switches))


def _blocked_s(system: System) -> dict[int, float]:
    """Return, by pid, how many seconds the kernel's hung-task watchdog says that processes have been blocked."""
    try:
        lines = read_lines(system)
    except NotRead:
        return {}
    found = (HUNG_TASK.search(line.text) for line in lines)
    # The kernel repeats the message with longer times: the last line counts.
    return {int(one["pid"]): float(one["seconds"]) for one in found if one is not None}
