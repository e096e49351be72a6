"""Reads which processes of this machine may be ranks: those that have a rank number or have joined a process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch import LOCAL_RANK_VARIABLES, RANK_VARIABLES, read_rank
from ddpdoctor.collect.proc import read_environment
from ddpdoctor.collect.system import list_pids, read_link, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.proc import Process

PROC = Path("/proc")
GROUP_THREADS = frozenset({"pt_gloo_runloop", "pt_nccl_watchdg", "pt_nccl_heartbt"})
"""The kernel's names for threads that torch starts with a process group. A forked worker does not inherit threads."""
LOADER_WORKER = "pt_data_worker"
SPAWNED = b"multiprocessing.spawn"
"""In the command line of a process that multiprocessing started by spawn."""
_IDENTITY = (*RANK_VARIABLES, *LOCAL_RANK_VARIABLES, "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A process with what its environment and its threads say of its part in a job."""

    process: Process
    env: Mapping[str, str]
    rank: int | None

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.process.pid

    @cached_property
    def threads(self) -> frozenset[str]:
        """The names of its threads."""
        return read_thread_names(self.pid)

    @property
    def joined(self) -> bool:
        """Whether it is a member of a process group, as torch 2.6 and later show by the names of threads."""
        return bool(GROUP_THREADS & self.threads)

    @cached_property
    def is_python(self) -> bool:
        """Whether its program is a Python."""
        return Path(read_link(PROC / str(self.pid) / "exe")).name.startswith("python")

    @cached_property
    def has_torch(self) -> bool:
        """Whether it has loaded torch."""
        return "libtorch" in read_text(PROC / str(self.pid) / "maps")

    @cached_property
    def is_spawned(self) -> bool:
        """Whether multiprocessing started it by spawn, and not as a loader's worker."""
        return SPAWNED in _read_command_line(self.pid) and LOADER_WORKER not in self.threads

    def has_identity_of(self, other: Candidate) -> bool:
        """Return whether two processes have the same variables of a rank, as a rank and its workers do."""
        return all(self.env.get(name) == other.env.get(name) for name in _IDENTITY)


def read_candidate(process: Process) -> Candidate:
    """Return a process with its environment, which is empty if we may not read it."""
    pairs = (os.fsdecode(pair).partition("=") for pair in read_environment(process.pid))
    env = {name: value for name, _, value in pairs if name}
    return Candidate(process=process, env=env, rank=read_rank(env))


def read_thread_names(pid: int) -> frozenset[str]:
    """Return the names of the threads of a process, which everybody may read."""
    tasks = PROC / str(pid) / "task"
    return frozenset(read_text(tasks / str(tid) / "comm").strip() for tid in list_pids(tasks))


def _read_command_line(pid: int) -> bytes:
    return read_text(PROC / str(pid) / "cmdline").encode()
