"""Reads the limits that the shell, the control groups and the machine set for a job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.gpu.pci import memory_nodes, parse_cpu_list
from ddpdoctor.collect.machine.cgroups import read_cpu_quota, read_memory_limit, read_task_limit
from ddpdoctor.collect.machine.memory import parse_meminfo
from ddpdoctor.collect.machine.shared_memory import read_shared_memory
from ddpdoctor.collect.machine.volumes import read_volumes
from ddpdoctor.collect.proc import read_status
from ddpdoctor.collect.system import UNLIMITED
from ddpdoctor.model.limits import Clock, Limit, Limits

if TYPE_CHECKING:
    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System


LOADER_WORKER = "pt_data_worker"
"""Torch's name for the workers of a DataLoader (torch/utils/data/_utils/worker.py, since 2.6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Counts over all visible processes; in a container these are the container's own."""

    uid: int | None = None
    of_user: int | None = None
    """Threads of this user, which RLIMIT_NPROC limits."""
    loader_workers: int = 0


def read_limits(system: System, plan: ReadingPlan) -> Limits:
    """Return all limits, with None for those that this system does not have."""
    proc, groups = system.path("/proc"), system.path("/sys/fs/cgroup")
    tasks, task_limit = read_tasks(system), read_task_limit(proc, groups)
    own = tasks or Tasks()
    total, available, swap = _memory(system)
    limit = read_memory_limit(proc, groups)
    cpus = system.calls.cpus()
    return Limits(
        nofile=_limit(system, "NOFILE"),
        memlock=_limit(system, "MEMLOCK"),
        nproc=_limit(system, "NPROC"),
        user_processes=tasks.of_user if tasks is not None else None,
        pids_max=task_limit.max if task_limit is not None else None,
        pids_current=task_limit.current if task_limit is not None else None,
        cpus_online=len(parse_cpu_list(system.text_or("/sys/devices/system/cpu/online"))) or len(cpus),
        cpus_allowed=cpus,
        cpu_quota=read_cpu_quota(proc, groups),
        memory_total_bytes=total,
        memory_available_bytes=available,
        swap_total_bytes=swap,
        memory_limit_bytes=limit.limit_bytes if limit is not None else None,
        memory_used_bytes=limit.used_bytes if limit is not None else None,
        oom_kills=limit.oom_kills if limit is not None else None,
        shm=read_shared_memory(system, own.uid, own.loader_workers, deep=plan.deep),
        volumes=read_volumes(system, deep=plan.deep),
        somaxconn=system.number_or_none("/proc/sys/net/core/somaxconn"),
        numa_nodes=len(memory_nodes(system)),
        numa_balancing=system.number_or_none("/proc/sys/kernel/numa_balancing"),
        nproc_applies=tasks is None or tasks.uid != 0,
    )


def _limit(system: System, name: str) -> Limit | None:
    try:
        soft, hard = system.calls.rlimit(name)
    except OSError:
        return None
    return Limit(soft=None if soft == UNLIMITED else soft, hard=None if hard == UNLIMITED else hard)


def _memory(system: System) -> tuple[int | None, int | None, int | None]:
    """Return total memory, available memory and swap in bytes."""
    found = parse_meminfo(system.text_or("/proc/meminfo"))
    if not found and system.live:
        return _memory_elsewhere()
    return found.get("MemTotal"), found.get("MemAvailable"), found.get("SwapTotal")


def _memory_elsewhere() -> tuple[int, int, int]:
    """Return the same on a system without /proc, such as macOS."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available, psutil.swap_memory().total


def read_clock(system: System, plan: ReadingPlan) -> Clock:  # noqa: ARG001 - all collectors get both
    """Return whether the clock is synchronized, from adjtimex; the node that gathers facts measures the offset."""
    try:
        unsynchronized = system.calls.clock_unsynchronized()
    except OSError:
        return Clock(synchronized=None, offset_s=None)
    return Clock(synchronized=not unsynchronized, offset_s=None)


def read_tasks(system: System) -> Tasks | None:
    """Count from /proc/PID/status; return None on a system without /proc."""
    proc = system.path("/proc")
    uid = _uid(read_status("self", proc))
    if uid is None:
        return None
    found = [read_status(name, proc) for name in system.names("/proc") if name.isdecimal()]
    return Tasks(
        uid=uid,
        of_user=sum(int(status.get("Threads", "0")) for status in found if _uid(status) == uid),
        loader_workers=sum(status.get("Name") == LOADER_WORKER for status in found),
    )


def _uid(status: dict[str, str]) -> int | None:
    """Return the real user id, because the limit applies to that user."""
    match = re.match(r"\d+", status.get("Uid", ""))
    return int(match.group()) if match else None
