"""What a machine, its container and its shell allow a job: memory, processors, files, disks, the clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit. None means unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A mounted folder and what is left in it."""

    path: str
    purpose: str
    """Such as "TMPDIR", "working directory"."""
    fstype: str | None
    total_bytes: int
    free_bytes: int
    writable: bool
    write_mb_s: float | None = None
    """Measured with --deep; MB is 1e6 bytes."""
    error: str | None = None
    """Why it could not be looked at: "did not answer within 2 s"; sizes are then 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """What is mounted at /dev/shm."""

    volume: Volume
    stale_files: tuple[str, ...]
    """Files of NCCL and torch whose owners have gone."""
    stale_bytes: int
    loader_workers: int = 0
    """Workers of a torch DataLoader that run here now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this process, of its cgroup, and of the machine. None: unlimited, or not known where it says so."""

    nofile: Limit | None
    memlock: Limit | None
    nproc: Limit | None
    user_processes: int | None
    """Threads that this user runs now, in the sense of RLIMIT_NPROC; None where not known."""
    pids_max: int | None
    """Of the cgroup and those above it, the limit on tasks that leaves least."""
    pids_current: int | None
    cpus_online: int
    cpus_allowed: tuple[int, ...]
    """By affinity, of the process that looked."""
    cpu_quota: float | None
    """CPUs that the cgroup grants, such as 2.5; None: no quota."""
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    swap_total_bytes: int | None
    memory_limit_bytes: int | None
    """Of the cgroup and those above it, the limit that leaves least; None: no limit."""
    memory_used_bytes: int | None
    """What the cgroup of that limit has in use, without page cache that can be dropped."""
    oom_kills: int | None
    """How often the kernel has killed for memory in the cgroup of that limit; None: no limit, or not known."""
    shm: SharedMemory | None
    volumes: tuple[Volume, ...]
    somaxconn: int | None
    numa_nodes: int
    numa_balancing: int | None
    nproc_applies: bool = True
    """False for root, whom RLIMIT_NPROC does not bind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The wall clock."""

    synchronised: bool | None
    """What the kernel says (STA_UNSYNC); None where it cannot be asked."""
    offset_s: float | None
    """Against the clock of rank 0: positive where this one is ahead; None on rank 0's node and where nothing was
    gathered."""
