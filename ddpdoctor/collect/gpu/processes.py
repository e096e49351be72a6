"""Tells whether a process on a GPU belongs to this job or to somebody else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.collect.proc import read_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.collect.system import System

JOB = re.compile(r"/(job_\d+|slurmstepd.*?/job_\d+|[^/]*pod[0-9a-f]{8}[-_0-9a-f]{20,}[^/]*)(?:/|$)")
"""The part of a cgroup path that names a Slurm job or a Kubernetes pod."""
FABRIC_MANAGER = "nv-fabricmanage"
"""The kernel cuts process names to 15 characters."""


def sees_host_pids(system: System) -> bool:
    """Return whether we see the host's processes: outside containers, process 2 is the kernel's kthreadd."""
    return system.text_or("/proc/2/comm") == "kthreadd"


def read_fabric_manager(system: System) -> bool | None:
    """Return whether the fabric manager runs, or None if we cannot see the host's processes."""
    names = (system.text_or(f"/proc/{pid}/comm") for pid in system.names("/proc") if pid.isdecimal())
    if any(name == FABRIC_MANAGER for name in names):
        return True
    return False if sees_host_pids(system) else None


class Kin:
    """The processes of the job that this process belongs to."""

    def __init__(self, system: System) -> None:
        """Read the ancestors of this process."""
        self._system = system
        pid = int((system.text_or("/proc/self/stat").split() or ["0"])[0])
        self._own = (pid, *self._above(pid))
        # Under a launcher, the ranks beside this one are children of the same parent.
        self._root = self._own[2:3] if "RANK" in system.env or "SLURM_PROCID" in system.env else self._own[1:2]
        self._job = self._job_of("self")

    def name(self, pid: int) -> str | None:
        """Return a process's name, or None if we cannot see it."""
        return self._system.text_or(f"/proc/{pid}/comm") or None

    def ours(self, pid: int) -> bool:
        """Return whether a process belongs to this job: the same batch job, pod or launcher."""
        if pid in self._own or any(above in self._root for above in self._above(pid)):
            return True
        return self._job is not None and self._job_of(str(pid)) == self._job

    def _above(self, pid: int) -> Iterator[int]:
        for _ in range(64):
            process = read_process(pid, self._system.path("/proc"))
            if process is None or process.ppid <= 1:
                return
            pid = process.ppid
            yield pid

    def _job_of(self, pid: str) -> str | None:
        found = JOB.search(self._system.text_or(f"/proc/{pid}/cgroup"))
        return found.group(1).rpartition("/")[2] if found else None
