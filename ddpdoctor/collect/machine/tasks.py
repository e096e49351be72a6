"""Counts the threads of this user, and the DataLoader workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.process.proc import read_status

if TYPE_CHECKING:
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
